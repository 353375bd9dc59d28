"""Judge models."""
