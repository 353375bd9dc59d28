"""Tasks in folders, in Harbor's format."""
