"""Rewards: rules now, judges to come."""
