"""Deployment targets."""
