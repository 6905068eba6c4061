"""Checks on the cluster before a job is queued, and the list of bad nodes."""
