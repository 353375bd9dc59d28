"""Environment of an online shop with 10,000 products, shown by a text browser. `python -m
components.environments.worlds.webshop` serves the same pages to real browsers."""

from components.environments.worlds.webshop.environment import Webshop

__all__ = ["Webshop"]
