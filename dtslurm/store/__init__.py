"""The run directory (truth) and a rebuildable index of runs."""
