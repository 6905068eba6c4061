"""Run Python programs on a login node, and check their answers."""
