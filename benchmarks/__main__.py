"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import startup

startup.main()
