"""Records of past runs, their artifacts and lineage, and live views of running stages."""
