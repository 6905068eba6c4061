"""A controller with a thousand nodes of five kinds, all but the first of which do not exist."""

from __future__ import annotations

from pathlib import Path

from tests.lab.cluster import PATIENCE, SlurmLab

# (name, nodes, Gres, CPUs of two sockets, memory in MiB, features, state)
KINDS = (
    ("a", 399, "gpu:a100:4", 64, 512000, "amd,hbm40g", "IDLE"),
    ("b", 100, "gpu:a100:4", 64, 512000, "amd,hbm80g", "IDLE"),
    ("h", 200, "gpu:h100:8", 96, 2048000, "intel", "DRAIN"),
    ("c", 300, "", 128, 256000, "cpu", "IDLE"),
)


class ManyNodes(SlurmLab):
    """Node n1 is a real one; the others are in slurm.conf alone.

    The controller cannot reach them: some seconds after its start it says so in their states.
    """

    def __init__(self, root: Path) -> None:
        lines = ["SlurmdTimeout=0", "TreeWidth=65533", "TCPTimeout=1", "MessageTimeout=30"]
        for name, count, gres, cpus, memory, features, state in KINDS:
            lines.append(
                f"NodeName={name}[1-{count}] NodeHostname=nowhere NodeAddr=127.0.0.1 Port=1 CPUs={cpus} "
                f"Sockets=2 CoresPerSocket={cpus // 2} ThreadsPerCore=1 RealMemory={memory} "
                f"Feature={features} State={state}" + (f" Gres={gres}" if gres else "")
            )
        lines += [
            "PartitionName=main Nodes=a[1-399],b[1-100] Default=YES MaxTime=2-00:00:00 MaxNodes=64 State=UP",
            "PartitionName=short Nodes=n1 MaxTime=00:10:00 State=UP",
            "PartitionName=h100 Nodes=h[1-200] MaxTime=1-00:00:00 AllowAccounts=ml State=UP",
            "PartitionName=cpu Nodes=c[1-300] MaxTime=UNLIMITED State=UP",
        ]
        super().__init__(root, nodes=1, extra_conf=lines)

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Return when the real node is idle."""

        def idle() -> bool:
            return self.run(["sinfo", "-h", "-n", "n1", "-o", "%T"], check=False).stdout.split()[:1] == [
                "idle"
            ]

        self.wait_for("nodes", idle, timeout)

    def asked(self) -> dict[str, int]:
        """How many requests of each kind the controller has had of its users, by its own count."""
        result = self.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
        counts = {}
        for line in result.splitlines():
            name, _, rest = line.strip().partition(" ")
            if name.startswith("REQUEST_") and name not in {
                "REQUEST_STATS_INFO",
                "REQUEST_COMPLETE_BATCH_SCRIPT",
            }:
                counts[name] = int(rest.partition("count:")[2].split()[0])
        return counts
