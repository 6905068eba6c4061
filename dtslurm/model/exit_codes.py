"""Exit codes that mean the same wherever dtslurm sees them."""

from __future__ import annotations

WANTS_REQUEUE = 85  # saved, and wants another start; the worker's watching.py and dtslurm.train say it too
