"""The embedded scheduler for a single machine: a queue, srun and scontrol without Slurm."""
