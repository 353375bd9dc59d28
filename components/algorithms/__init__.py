"""Training algorithms: losses, advantages, trainers."""
