"""Rewards given by language models and trained reward models."""
