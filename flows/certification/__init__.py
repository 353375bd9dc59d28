"""Certification of a model, an engine and a trainer together, for the stage `certify` and `flows.certify`."""
