"""Reward models: data, losses, training, checkpoint format."""
