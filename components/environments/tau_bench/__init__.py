"""tau-bench: customer service in two domains, on the published databases, policies and tasks.

The data is read from a folder and is not part of Espalier; the tools are written here from the data and from recorded
conversations. `data` reads the folder, `database` holds the state of an episode, `retail` and `airline` the tools,
`user` the simulated user, `environment` the scenarios, the episode and its reward.
"""

from components.environments.tau_bench.environment import TauBench

__all__ = ["TauBench"]
