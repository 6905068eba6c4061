"""Benchmarks of dtslurm and of similar tools, compared by ratios within a run on the same machine."""
