"""Commands as tools of an agent: permissions, subprocesses, background jobs, and the MCP tools."""
