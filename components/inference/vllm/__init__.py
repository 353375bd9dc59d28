"""vLLM as a server in an environment of its own: started and watched, or found behind a URL."""
