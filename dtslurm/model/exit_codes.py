"""Exit codes with the same meaning everywhere in dtslurm."""

from __future__ import annotations

WANTS_REQUEUE = 85  # training has saved and requests another attempt; also defined in worker/ and train/
NO_PROGRESS = 93  # the supervisor stopped a run that made no progress; also defined in worker/
