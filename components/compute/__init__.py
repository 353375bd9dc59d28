"""Where a stage runs."""
