"""Job files: their detection, stages, roles and variables."""
