"""Selection of trajectories and groups."""
