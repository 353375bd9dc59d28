"""Environment of questions over SQLite databases."""

from components.environments.worlds.sql.environment import Sql

__all__ = ["Sql"]
