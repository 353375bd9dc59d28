"""Engines behind one OpenAI-compatible protocol."""
