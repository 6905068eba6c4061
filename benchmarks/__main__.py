"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import startup
from benchmarks.planner import score

startup.main()
score.main()
