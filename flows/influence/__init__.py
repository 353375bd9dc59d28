"""Influence of rewards and of training groups on a policy, for `flows.rejudge` and `flows.attribute`."""
