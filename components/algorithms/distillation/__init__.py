"""On-policy distillation from a teacher."""
