"""Recipes: programs over stages."""
