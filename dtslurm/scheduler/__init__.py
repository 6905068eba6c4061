"""Schedulers: Slurm over any transport, and the embedded scheduler of this machine."""
