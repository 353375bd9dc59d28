"""Judge models: specs, clients, prompts, caching, cost and parsing of answers."""
