"""Puzzles that are solved by writing code."""

from components.environments.python_tool.environment import PythonTool

__all__ = ["PythonTool"]
