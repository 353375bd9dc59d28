"""Asking a model for a judgement: which one, in what words, at what price, and what its answer says."""
