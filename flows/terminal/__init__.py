"""Console output, command-line arguments, signals and exit codes."""
