"""Run commands and move bytes, here or on a login node. The only place where processes start."""
