"""Policy gradient: GRPO, RLOO, GSPO and related algorithms, as settings of one trainer."""
