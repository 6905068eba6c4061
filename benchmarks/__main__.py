"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import logs, snapshot, startup
from benchmarks.planner import score

startup.main()
snapshot.main()
logs.main()
score.main()
