"""What a cluster behind SSH costs: a status and a hundred submissions, beside bare ``ssh``.

A real Slurm and a real sshd on this machine, so that the round trip itself is as good as nothing: what is
left is handshakes, processes and disks. The runs that a status shows have just ended, or are held; Slurm is
asked each time, and once more for a status that shares the answer. ``ssh X sbatch`` is measured as most users
have it, with a login for each command, and over an open ControlMaster. Submissions are measured within one
process, as sweeps and programs make them, and as one ``dtslurm submit`` after another. All take turns, so
that a busy moment hits them alike. ``python -m benchmarks.remote``; ``--json`` for programs.
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

STATUS_ROUNDS, SUBMISSIONS, PROCESSES = 20, 100, 20
OURS = Path(__file__).resolve().parents[1] / "dtslurm"
PROFILE = """\
extends: slurm
login: {{host: login, transport: openssh}}
slurm: {{partitions: {{main: {{}}}}, partition: main}}
node_types: {{any: {{cpus: 8}}}}
paths: {{run_root: {root}}}
"""
BARE, WARM = "ssh X sbatch, a login each", "ssh X sbatch, ControlMaster"
CALL, COMMAND = "dtslurm, one process", "dtslurm submit, a process each"
TRUE, STATUS = "ssh X true, ControlMaster", "dtslurm status"
SHARED = "dtslurm status, within 3 s of another"


class Clock:
    """Takes times by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def turn(self, name: str, work: Callable[[], object]) -> None:
        """Do a piece of work and note its milliseconds."""
        begin = time.perf_counter()
        work()
        self.taken.setdefault(name, []).append((time.perf_counter() - begin) * 1000)


def prepare_place(root: Path, ssh: SshLab) -> None:
    """Make a project and a profile, and bytecode as an installed package has it."""
    project = root / "project"
    profiles = root / "config" / "dtslurm" / "cluster_profiles"
    project.mkdir()
    profiles.mkdir(parents=True)
    (project / "train.py").write_text("print('hello')\n")
    (profiles / "far.yaml").write_text(PROFILE.format(root=root / "runs"))
    os.environ.update(
        {**ssh.env, **{f"XDG_{name.upper()}_HOME": str(root / name) for name in ("config", "state", "cache")}}
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(root / "bytecode")
    compileall.compile_dir(OURS, quiet=1)
    os.chdir(project)


def measure(root: Path, ssh: SshLab) -> Clock:
    """Return the times."""
    prepare_place(root, ssh)
    alone = ["ssh", "-F", str(ssh.config), "-o", "ControlPath=none", "login"]
    shared = ["ssh", "-F", str(ssh.config), "-o", f"ControlPath={ssh.root}/bare"]
    dtslurm = [str(Path(sys.executable).with_name("dtslurm"))]

    def run(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run(
            argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    run(*shared, "-o", "ControlMaster=yes", "-N", "-f", "login")()
    context = Context()
    request = JobRequest(script="train.py", cluster="far", time="5", no_check=True, sbatch=("--hold",))

    def call() -> None:
        submit(context, prepare(context, request, standalone=False))

    script = root / "bare.sh"
    script.write_text("#!/bin/sh\n#SBATCH --hold --output=/dev/null\ntrue\n")
    command = run(
        *dtslurm, "submit", "--cluster", "far", "-t", "5", "--no-check", "--sbatch=--hold", "train.py"
    )
    status = run(*dtslurm, "status", "--cluster", "far")
    call()  # logs in, and learns about the site
    command()
    run(*dtslurm, "submit", "--cluster", "far", "-t", "5", "--no-check", "--wait", "train.py")()
    time.sleep(2.5)  # what was just written is not remembered yet
    status()
    cache, clock = cache_of(context, context.cluster("far")), Clock()
    for number in range(SUBMISSIONS):
        clock.turn(WARM, run(*shared, "login", "sbatch", str(script)))
        clock.turn(CALL, call)
        if number % (SUBMISSIONS // PROCESSES) == 0:
            clock.turn(BARE, run(*alone, "sbatch", str(script)))
            clock.turn(COMMAND, command)
    for _ in range(STATUS_ROUNDS):
        clock.turn(TRUE, run(*shared, "login", "true"))
        clock.turn("ssh X squeue --me, ControlMaster", run(*shared, "login", "squeue", "--me"))
        cache.change()  # as after a while: Slurm is asked anew
        clock.turn(STATUS, status)
        clock.turn(SHARED, status)
    run(*shared, "-O", "exit", "login")()
    return clock


def main() -> None:
    """Measure and print."""
    software = find_or_unpack(accounting=True)
    with (
        tempfile.TemporaryDirectory(prefix="dtb-", dir="/tmp") as name,
        SlurmLab(Path(name) / "lab", nodes=1, accounting=False, software=software) as lab,
        ssh_lab() as ssh,
    ):
        path = f"{sys.base_prefix}/bin:{lab.env['PATH']}"  # no manager's shim: another 0.1 s
        ssh.server("login", env={**lab.env, "PATH": path, "HOME": str(ssh.home("login"))})
        taken = measure(Path(name), ssh).taken
    found = {name: round(statistics.median(times), 1) for name, times in taken.items()}
    mean = {name: statistics.fmean(times) for name, times in taken.items()}
    ratios = {
        f"{ours}, of {theirs}": round(mean[ours] / mean[theirs], 2)
        for ours in (CALL, COMMAND)
        for theirs in (BARE, WARM)
    }
    more = round(found[STATUS] - found[TRUE], 1)
    if "--json" in sys.argv:
        told = {"medians_ms": found, "submission_ratios": ratios, "status_more_ms": more}
        print(json.dumps({"schema": 1, "remote": told}, indent=1))
        return
    for what, value in found.items():
        print(f"  {what:40} {value:8.1f} ms")
    print(f"a status takes {more:.0f} ms more than ssh true; submissions in a row, by their mean:")
    for what, ratio in ratios.items():
        print(f"  {what:60} {ratio:5.2f} x")


if __name__ == "__main__":
    main()
