"""Measured runs as rows, and their comparison with the planner's predictions."""
