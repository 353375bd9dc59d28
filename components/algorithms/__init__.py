"""Losses, advantages, trainers."""
