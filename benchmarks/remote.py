"""What a cluster behind SSH costs: a status, a submission, beside bare ``ssh`` with an open ControlMaster.

A real Slurm and a real sshd on this machine, so that the round trip itself is as good as nothing. The two
sides take turns. ``python -m benchmarks.remote``; ``--json`` for programs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dtslurm.services.context import Context
from dtslurm.services.prepare import prepare
from dtslurm.services.request import JobRequest
from dtslurm.services.submit import submit
from tests.lab.cluster import SlurmLab
from tests.lab.software import find_or_unpack
from tests.sshd.servers import SshLab, ssh_lab

STATUS_ROUNDS, SUBMISSIONS = 20, 30
PROFILE = """\
extends: slurm
login: {{host: login, transport: openssh}}
slurm: {{partitions: {{main: {{}}}}, partition: main}}
node_types: {{any: {{cpus: 8}}}}
paths: {{run_root: {root}}}
"""


def seconds(work: Callable[[], object]) -> float:
    """Return how long a piece of work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(root: Path, ssh: SshLab, lab: SlurmLab) -> dict[str, float]:
    """Return the medians in milliseconds."""
    project = root / "project"
    profiles = root / "config" / "dtslurm" / "cluster_profiles"
    project.mkdir()
    profiles.mkdir(parents=True)
    (project / "train.py").write_text("print('hello')\n")
    (profiles / "far.yaml").write_text(PROFILE.format(root=root / "runs"))
    os.environ.update(
        {**ssh.env, **{f"XDG_{name.upper()}_HOME": str(root / name) for name in ("config", "state", "cache")}}
    )
    os.chdir(project)
    bare = ["ssh", "-F", str(ssh.config), "-o", f"ControlPath={ssh.root}/bare"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*bare, "-o", "ControlMaster=yes", "-N", "-f", "login"], check=True, **quiet)  # type: ignore[call-overload]

    context = Context()
    request = JobRequest(script="train.py", cluster="far", time="5", no_check=True, sbatch=("--hold",))

    def ours() -> None:
        submit(context, prepare(context, request, standalone=False))

    script = root / "bare.sh"
    script.write_text("#!/bin/sh\n#SBATCH --hold --output=/dev/null\ntrue\n")
    taken: dict[str, list[float]] = {}

    def turn(name: str, work: Callable[[], object]) -> None:
        taken.setdefault(name, []).append(seconds(work) * 1000)

    def run(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run([*argv], check=True, **quiet)  # type: ignore[call-overload]

    ours()  # logs in, and learns about the site
    for _ in range(SUBMISSIONS):
        turn("ssh login sbatch", run(*bare, "login", "sbatch", str(script)))
        turn("submission", ours)
    dtslurm = str(Path(sys.executable).with_name("dtslurm"))
    for _ in range(STATUS_ROUNDS):
        turn("ssh login true", run(*bare, "login", "true"))
        turn("ssh login squeue --me", run(*bare, "login", "squeue", "--me"))
        turn("dtslurm status", run(dtslurm, "status", "--cluster", "far"))
    subprocess.run([*bare, "-O", "exit", "login"], check=True, **quiet)  # type: ignore[call-overload]
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def main() -> None:
    """Measure and print."""
    software = find_or_unpack(accounting=True)
    with (
        tempfile.TemporaryDirectory(prefix="dtb-", dir="/tmp") as name,
        SlurmLab(Path(name) / "lab", nodes=1, accounting=False, software=software) as lab,
        ssh_lab() as ssh,
    ):
        ssh.server("login", env={**lab.env, "HOME": str(ssh.home("login"))})
        found = measure(Path(name), ssh, lab)
    ratio = found["submission"] / found["ssh login sbatch"]
    more = found["dtslurm status"] - found["ssh login true"]
    if "--json" in sys.argv:
        told = {"medians_ms": found, "submission_ratio": round(ratio, 2), "status_more_ms": round(more, 1)}
        print(json.dumps({"schema": 1, "remote": told}, indent=1))
        return
    for what, value in found.items():
        print(f"  {what:24} {value:8.1f} ms")
    print(f"a submission is {ratio:.2f} x a bare ssh sbatch; a status takes {more:.0f} ms more than ssh true")


if __name__ == "__main__":
    main()
