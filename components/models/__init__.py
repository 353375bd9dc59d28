"""Weights: find, convert, load, LoRA, merge."""
