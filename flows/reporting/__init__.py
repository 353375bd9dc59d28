"""Results of runs: console table, report, comparison of runs."""
