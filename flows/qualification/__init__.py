"""Qualification of an environment for `flows.qualify`."""
