"""Data of one's own: rows from files and datasets, their forms, and the checks before training."""
