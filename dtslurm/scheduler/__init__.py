"""The queue: a real Slurm over any transport, or the embedded default on this machine."""
