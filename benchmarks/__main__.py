"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import diagnose, logs, snapshot, ssh, startup
from benchmarks.planner import score

startup.main()
ssh.main()
snapshot.main()
logs.main()
diagnose.main()
score.main()
