"""Export, model card, serving check."""
