"""Where code that a model wrote is run."""

from components.sandbox.bubblewrap import HOME, Limits, Result, Sandbox

__all__ = ["HOME", "Limits", "Result", "Sandbox"]
