"""Execution of stages: placement, overlap, processes of one stage, tracking."""
