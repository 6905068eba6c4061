"""``python -m benchmarks`` runs every benchmark."""

from benchmarks import ssh, startup

startup.main()
ssh.main()
