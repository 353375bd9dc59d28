"""Rewards computed by rules, without a model."""
