"""How far the planner is from published runs; ``python -m benchmarks.planner`` prints it."""
