"""Rewards: rules, judge models, learned reward models, and compositions of them."""
