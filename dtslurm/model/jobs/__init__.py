"""What is asked for: jobs, sweeps and stages, before anything is queued."""
