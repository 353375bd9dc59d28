"""Stages on machines provided by SkyPilot: clouds, Kubernetes, Slurm."""
