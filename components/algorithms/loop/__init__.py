"""The training loop: optimizer, schedule, guards, checkpoints, distributed training."""
