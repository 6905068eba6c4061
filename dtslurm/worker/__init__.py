"""Programs that run inside the job or on the far side: stdlib only, Python >= 3.6, nothing of dtslurm."""
