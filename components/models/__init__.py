"""Model weights: lookup, conversion, loading, LoRA adapters and merging."""
