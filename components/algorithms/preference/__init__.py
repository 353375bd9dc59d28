"""Preference learning: DPO, IPO, ORPO, KTO."""
