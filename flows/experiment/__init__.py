"""The experiment: its typed spec, composition by Hydra, cross-field checks, and the requests of its stages."""
