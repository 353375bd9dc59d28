"""Agent loops and the concurrent collector."""
