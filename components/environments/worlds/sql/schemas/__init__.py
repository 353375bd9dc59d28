"""Database schemas, each with its tables, its data generator and its questions."""

from components.environments.worlds.sql.schemas import flights, library, school, shop
from components.environments.worlds.sql.schemas.base import Question, Schema

SCHEMAS: dict[str, Schema] = {
    "shop": shop.SCHEMA,
    "library": library.SCHEMA,
    "flights": flights.SCHEMA,
    "school": school.SCHEMA,
}

__all__ = ["SCHEMAS", "Question", "Schema"]
