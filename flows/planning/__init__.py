"""Plans: stages that would run, cached stages, estimated time and cost."""
