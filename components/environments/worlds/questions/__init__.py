"""Question answering with several tools: `base` has the shared parts; `todo`, `weather` and `movie` are the worlds."""
