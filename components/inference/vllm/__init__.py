"""vLLM in a separate Python environment: a server that the run starts and monitors, or an existing one."""
