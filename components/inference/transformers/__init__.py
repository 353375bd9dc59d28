"""The embedded engine: transformers in the process of the stage."""
