"""Environments that wrap a package or a server."""
