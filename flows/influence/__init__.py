"""Influence of rewards and of training groups on a policy, for `flows.explain rejudge` and `attribute`."""
