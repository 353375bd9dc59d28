"""Sweeps: one experiment at several points, with Hydra's multirun (`-m`).

`points` runs a point and records its outcome in the sweep's folder, `<root>/sweeps/<id>`. A failed point does not stop
the others, with any launcher. `summary` reads these records at the end: table, comparison, commands of the failed
points, exit code. `flows.experiment.sweep_settings` validates a sweep before it starts. `study` is the sweeper on top
of Optuna, `pruning` its counterpart in the run of a point. `launcher` sends points to SkyPilot machines, where
`elsewhere` runs them. `hydra_plugins/espalier.py` registers the sweeper and the launcher as Hydra plugins.
"""
