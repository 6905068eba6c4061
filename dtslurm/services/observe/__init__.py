"""Observe runs: telemetry, diagnosis, reports, comparisons and usage."""
