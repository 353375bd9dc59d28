"""Reward models: data, losses, training, stored form."""
