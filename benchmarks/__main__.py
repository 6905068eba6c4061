"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import snapshot, startup
from benchmarks.planner import score

startup.main()
snapshot.main()
score.main()
