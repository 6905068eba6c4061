"""Measured runs as rows, and the planner's predictions beside them."""
