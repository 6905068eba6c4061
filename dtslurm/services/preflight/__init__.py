"""Checks on the cluster before submission, and the bad-node list."""
