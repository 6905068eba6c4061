"""Prepare, queue and repeat jobs: single ones, stages, sweeps, Python functions."""
