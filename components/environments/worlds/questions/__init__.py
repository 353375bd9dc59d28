"""Questions that take several tools to answer: `base` has what they share, `todo`, `weather` and `movie` the worlds."""
