"""Choice of a training method for `flows.advise`."""
