"""People read the episodes of a run and say what they think of them: `python -m flows.annotate`."""
