"""Prepare, queue and resubmit jobs: single jobs, stages, sweeps and Python functions."""
