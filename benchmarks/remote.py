"""The time of `dtslurm status` and of 100 submissions on a cluster behind SSH, beside bare ``ssh`` commands.

The benchmark starts a Slurm and an SSH server on this machine, so that the time contains handshakes,
processes and disk access, but no network latency. All commands run alternately.

- Status: the runs of the list have just ended or are held. Before each `dtslurm status`, the cached answer of
  Slurm is made invalid; the command that follows within 3 s uses the new one.
- Submissions: dtslurm submits in one process, as sweeps and programs do, and with one `dtslurm submit` after
  the other. ``ssh X sbatch`` opens a new connection for each command, as it does for most users, or uses an
  open ControlMaster.

Run it with ``python -m benchmarks.remote [--json]``.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.monitor import cache_of
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from tests.lab.cluster import SlurmLab
from tests.lab.software import find_or_unpack
from tests.sshd.servers import SshLab, ssh_lab

STATUS_ROUNDS, SUBMISSIONS, NEW_PROCESSES = 20, 100, 20
PACKAGE = Path(__file__).resolve().parents[1] / "dtslurm"
PROFILE = """\
extends: slurm
login: {{host: login, transport: openssh}}
slurm: {{partitions: {{main: {{}}}}, partition: main}}
node_types: {{any: {{cpus: 8}}}}
paths: {{run_root: {root}}}
"""
SSH_SBATCH, MASTER_SBATCH = "ssh X sbatch, new connection", "ssh X sbatch, ControlMaster"
IN_PROCESS, COMMAND = "dtslurm, one process", "dtslurm submit, new process"
SSH_TRUE, SSH_SQUEUE = "ssh X true, ControlMaster", "ssh X squeue --me, ControlMaster"
STATUS, CACHED_STATUS = "dtslurm status", "dtslurm status, cached queue"


class Stopwatch:
    """The milliseconds of pieces of work, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def measure(self, name: str, work: Callable[[], object]) -> None:
        """Call ``work`` and add its milliseconds."""
        start = time.perf_counter()
        work()
        self.times.setdefault(name, []).append((time.perf_counter() - start) * 1000)


def create_project(root: Path, ssh: SshLab) -> None:
    """Create a project and a cluster profile, and compile dtslurm as an installation does."""
    project = root / "project"
    profiles = root / "config" / "dtslurm" / "cluster_profiles"
    project.mkdir()
    profiles.mkdir(parents=True)
    (project / "train.py").write_text("print('hello')\n")
    (profiles / "remote.yaml").write_text(PROFILE.format(root=root / "runs"))
    os.environ.update(
        {**ssh.env, **{f"XDG_{name.upper()}_HOME": str(root / name) for name in ("config", "state", "cache")}}
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(root / "bytecode")
    compileall.compile_dir(PACKAGE, quiet=1)
    os.chdir(project)


def measure(root: Path, ssh: SshLab) -> Stopwatch:
    """Return the times of all commands."""
    create_project(root, ssh)
    ssh_new = ["ssh", "-F", str(ssh.config), "-o", "ControlPath=none", "login"]
    ssh_master = ["ssh", "-F", str(ssh.config), "-o", f"ControlPath={ssh.root}/bare"]
    dtslurm = [str(Path(sys.executable).with_name("dtslurm"))]

    def run(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run(
            argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    run(*ssh_master, "-o", "ControlMaster=yes", "-N", "-f", "login")()
    context = Context()
    request = JobRequest(script="train.py", cluster="remote", time="5", no_check=True, sbatch=("--hold",))

    def submit_in_process() -> None:
        submit(context, prepare(context, request, standalone=False))

    script = root / "bare.sh"
    script.write_text("#!/bin/sh\n#SBATCH --hold --output=/dev/null\ntrue\n")
    command = run(
        *dtslurm, "submit", "--cluster", "remote", "-t", "5", "--no-check", "--sbatch=--hold", "train.py"
    )
    status = run(*dtslurm, "status", "--cluster", "remote")
    submit_in_process()  # opens the connection, and queries the cluster
    command()
    run(*dtslurm, "submit", "--cluster", "remote", "-t", "5", "--no-check", "--wait", "train.py")()
    time.sleep(2.5)  # dtslurm caches only files that are older than two seconds
    status()
    queue_cache, stopwatch = cache_of(context, context.cluster("remote")), Stopwatch()
    for number in range(SUBMISSIONS):
        stopwatch.measure(MASTER_SBATCH, run(*ssh_master, "login", "sbatch", str(script)))
        stopwatch.measure(IN_PROCESS, submit_in_process)
        if number % (SUBMISSIONS // NEW_PROCESSES) == 0:
            stopwatch.measure(SSH_SBATCH, run(*ssh_new, "sbatch", str(script)))
            stopwatch.measure(COMMAND, command)
    for _ in range(STATUS_ROUNDS):
        stopwatch.measure(SSH_TRUE, run(*ssh_master, "login", "true"))
        stopwatch.measure(SSH_SQUEUE, run(*ssh_master, "login", "squeue", "--me"))
        queue_cache.change()  # so that the next status queries Slurm
        stopwatch.measure(STATUS, status)
        stopwatch.measure(CACHED_STATUS, status)
    run(*ssh_master, "-O", "exit", "login")()
    return stopwatch


def main() -> None:
    """Measure and print."""
    software = find_or_unpack(accounting=True)
    with (
        tempfile.TemporaryDirectory(prefix="dtb-", dir="/tmp") as name,
        SlurmLab(Path(name) / "lab", nodes=1, accounting=False, software=software) as lab,
        ssh_lab() as ssh,
    ):
        path = (
            f"{sys.base_prefix}/bin:{lab.env['PATH']}"  # a shim of a Python version manager would add 0.1 s
        )
        ssh.server("login", env={**lab.env, "PATH": path, "HOME": str(ssh.home("login"))})
        times = measure(Path(name), ssh).times
    medians = {command: round(statistics.median(values), 1) for command, values in times.items()}
    means = {command: statistics.fmean(values) for command, values in times.items()}
    ratios = {
        f"{command} / {reference}": round(means[command] / means[reference], 2)
        for command in (IN_PROCESS, COMMAND)
        for reference in (SSH_SBATCH, MASTER_SBATCH)
    }
    difference = round(medians[STATUS] - medians[SSH_TRUE], 1)
    if "--json" in sys.argv:
        results = {"medians_ms": medians, "submission_ratios": ratios, "status_more_ms": difference}
        print(json.dumps({"schema": 1, "remote": results}, indent=1))
        return
    print("medians")
    for command, milliseconds in medians.items():
        print(f"  {command:40} {milliseconds:8.1f} ms")
    print(
        f"dtslurm status takes {difference:.0f} ms more than ssh X true; ratios of the means of submissions"
    )
    for label, ratio in ratios.items():
        print(f"  {label:60} {ratio:5.2f} x")


if __name__ == "__main__":
    main()
