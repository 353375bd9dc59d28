"""Self-contained HTML pages: one layout, shared parts, charts, and the content of each page as plain data."""
