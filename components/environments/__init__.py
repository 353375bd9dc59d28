"""The environment protocol and the built-in environments."""
