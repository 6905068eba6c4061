"""A Slurm with any number of nodes that do not exist, and of jobs that wait on them for ever."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path

from dtslurm.model.jobs.job import JobRecord
from dtslurm.store import codec
from dtslurm.store.index import Index
from tests.lab.cluster import PATIENCE, SlurmLab

ARRAY = 1000  # tasks of one submission


class ScaleLab(SlurmLab):
    """One real node, and `fake` ones that are in slurm.conf alone; the partition `closed` starts nothing."""

    def __init__(self, root: Path, fake: int) -> None:
        node = f"NodeName=x[1-{fake}] NodeHostname=nowhere NodeAddr=127.0.0.1 Port=1 CPUs=96 Sockets=2"
        lines = [
            "SlurmdTimeout=0",
            "TreeWidth=65533",
            "TCPTimeout=1",
            "MessageTimeout=100",
            "MaxJobCount=500000",
            f"{node} CoresPerSocket=48 ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:h100:8 State=IDLE",
            f"PartitionName=main Nodes=x[1-{fake}] Default=YES MaxTime=2-00:00:00 State=UP",
            "PartitionName=short Nodes=n1 MaxTime=00:10:00 State=UP",
            "PartitionName=closed Nodes=n1 State=DOWN",
        ]
        super().__init__(root, nodes=1, extra_conf=lines)

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Return when the real node is idle."""

        def idle() -> bool:
            result = self.run(["sinfo", "-h", "-n", "n1", "-o", "%T"], check=False).stdout
            return "idle" in result.split()

        self.wait_for("nodes", idle, timeout)

    def queue_run(self, user: Path) -> None:
        """Queue one run of ARRAY tasks, each a job of its own to Slurm, and tell dtslurm of it."""
        token = secrets.token_hex(6)
        folder = user / "runs" / f"sweep-{token}"
        folder.mkdir(parents=True)
        record = JobRecord(
            token=token, cluster="slurm", name="sweep", run_dir=str(folder), phase="submitted",
            created_at=time.time(), world_size=8, array=f"1-{ARRAY}", script_hash="0" * 12,
        )  # fmt: skip
        words = ["sbatch", "--parsable", "-p", "closed", "-J", "sweep", f"--array=1-{ARRAY}"]
        job_id = self.run([*words, f"--comment={record.comment}", "--wrap", "true"]).stdout.strip()
        # What is changed in single tasks is kept by a record for each.
        self.run(["scontrol", "update", f"JobId={job_id}_[1-{ARRAY - 1}]", "Nice=1"], timeout=120)
        record = replace(record, job_id=job_id)
        (folder / "job.json").write_bytes(codec.encode({"schema": 1, **codec.plain(record)}))
        Index(user / "STATE" / "dtslurm" / "runs.sqlite").put(record)
