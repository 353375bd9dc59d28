"""Environment of puzzles that the agent solves by writing code."""

from components.environments.worlds.python_tool.environment import PythonTool

__all__ = ["PythonTool"]
