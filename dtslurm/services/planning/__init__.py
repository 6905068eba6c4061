"""The use cases of the planner."""
