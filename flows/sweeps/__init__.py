"""Sweeps: one experiment at several points, by Hydra's multirun (`-m`).

`points` runs a point and notes in the sweep's folder, `<root>/sweeps/<id>`, what became of it: a point that fails does
not end the others, whatever launcher runs them. `summary` reads the notes at the end: table, comparison, commands of
the failed points, exit code. `settings` and `checks` say what is wrong with a sweep before it starts. `study` is the
sweeper on top of Optuna, `pruning` its end in the run of a point. `launcher` sends points to machines of SkyPilot,
where `elsewhere` plays them. What Hydra has to find as plugins stands in `hydra_plugins/espalier.py`.
"""
