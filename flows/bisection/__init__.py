"""Search for the change that made two runs differ, for `flows.explain bisect`."""
