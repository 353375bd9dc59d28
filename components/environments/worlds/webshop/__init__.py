"""An online shop of 10,000 products, seen as a text browser shows it. `python -m
components.environments.worlds.webshop` serves the same pages to real browsers."""

from components.environments.worlds.webshop.environment import Webshop

__all__ = ["Webshop"]
