"""Logs of model calls that other tools wrote: their rows as parts of conversations, and the joining of these."""
