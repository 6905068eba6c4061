"""Cluster profiles written from a live cluster and verified against it, and the doctor."""
