"""Export, model card, serving check and deployment targets."""
