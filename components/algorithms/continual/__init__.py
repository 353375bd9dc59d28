"""Learning without forgetting: replay and elastic weight consolidation."""
