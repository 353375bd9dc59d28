"""Ways to play an episode: continuation, reflection, roles, self-play, teacher."""
