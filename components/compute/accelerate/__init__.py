"""Distributed training as a configuration file of accelerate describes it."""
