"""Place `process`: a subprocess for each stage."""
