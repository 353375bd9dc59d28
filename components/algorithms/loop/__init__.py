"""The training loop: optimizer, schedule, guards, checkpoints, several processes."""
