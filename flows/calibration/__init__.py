"""Measurement of how far a declared reward can be trusted."""
