"""Human annotation of a run's episodes: scores, choices and corrections (`python -m flows.runs annotate`)."""
