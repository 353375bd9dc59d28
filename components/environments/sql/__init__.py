"""Questions over databases."""

from components.environments.sql.environment import Sql

__all__ = ["Sql"]
