"""Interoperability: environments of Espalier for programs of others, over OpenEnv, MCP, Gymnasium and verifiers."""
