"""Slurm's text: pure argv builders and the only parser of what Slurm prints."""
