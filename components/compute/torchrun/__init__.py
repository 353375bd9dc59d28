"""Place `torchrun`: several processes that train together on this machine."""
