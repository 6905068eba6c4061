"""Planner: memory and time of a model's training step on a cluster, for each parallel layout. Pure math."""
