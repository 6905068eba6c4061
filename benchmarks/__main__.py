"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import logs, snapshot, startup

startup.main()
snapshot.main()
logs.main()
