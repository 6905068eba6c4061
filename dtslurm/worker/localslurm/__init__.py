"""The scheduler of one machine: a queue, srun and scontrol without Slurm."""
