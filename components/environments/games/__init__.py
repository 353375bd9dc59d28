"""Games and puzzles generated from a seed."""
