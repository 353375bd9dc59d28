"""Continual learning without forgetting: replay and elastic weight consolidation."""
