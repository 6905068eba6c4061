"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import snapshot, startup

startup.main()
snapshot.main()
