"""Programs that run inside a job or on the login node: stdlib only, Python >= 3.6, no dtslurm imports."""
