"""Requested work: jobs, sweeps and stages, before submission."""
