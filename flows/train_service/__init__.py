"""Training service for clients of the Tinker API."""
