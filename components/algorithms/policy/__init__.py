"""The policy in training: weights, packing of sequences, hidden states to log-probabilities."""
