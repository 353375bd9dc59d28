"""Inference engines with an OpenAI-compatible protocol."""
