"""Stages on machines that SkyPilot finds: clouds, Kubernetes, Slurm."""
