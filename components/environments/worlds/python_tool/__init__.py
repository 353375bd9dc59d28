"""Puzzles that are solved by writing code."""

from components.environments.worlds.python_tool.environment import PythonTool

__all__ = ["PythonTool"]
