"""Espalier's library: no Prefect, no Hydra, no global state. Usable from a notebook."""
