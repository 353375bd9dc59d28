"""Place `local`: the process of the flow."""
