"""Rewards: rules, and models that were trained; judges to come."""
