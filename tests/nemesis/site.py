"""The environment of schedules: a cluster, a small disk for runs, and faulty versions of Slurm's programs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dtslurm.worker.lib.node_blocklist import supervisor_file
from tests import preload
from tests.lab import network
from tests.lab.cluster import SlurmLab
from tests.lab.network import NetworkLab
from tests.nemesis.schedule import NODES, PROGRAMS, UNSTEADY, Fault

DISK_MB, HOME_MB = 96, 32
ROOT = Path(__file__).parents[2]
EARLIER = "8c3d9a76"  # a commit whose clients share the run root; its package is version 0.1.0.dev0
# A program of Slurm as a client finds it. The file beside it says what is wrong with it now.
SHIM = """\
#!/bin/bash
real=(REAL)
way=
[ -e "$0.fault" ] && read -r way <"$0.fault"
case $way in
  slow) sleep 1.5 ;;
  dies) kill -KILL $$ ;;
  "answers no more") "${real[@]}" "$@" >/dev/null 2>&1; kill -KILL $$ ;;
  babbles) echo "+++ welcome to this site +++|||"; "${real[@]}" "$@" | tr 'a-z0-9' 'b-za1-90'; exit 0 ;;
  "tells nothing") exit 0 ;;
esac
exec "${real[@]}" "$@"
"""
# Slurm sets the variables that this program prints for each batch script and each task of a step. The scripts
# of an earlier version cannot handle these faults at their start; they get the variables by --env instead.
TASK_PROLOG = """\
#!/bin/sh
grep -qxF "$SLURM_JOB_NAME" FOLDER/earlier-runs || cat FOLDER/task-environment
exit 0
"""


class Site:
    """A cluster and its disks; the environment of this process becomes that of a login node."""

    def __init__(self, root: Path, lab: SlurmLab, mounted: Sequence[str]) -> None:
        self.root, self.lab, self.mounted = root, lab, mounted
        self.disk, self.shims, self.flag = root / "disk", root / "bin", root / "prolog-fails"
        self.home = root / "home"
        self.earlier = _extract_earlier_version(root / "earlier")
        self.switch = root / "file-server-trouble"

    def fill_disk(self) -> None:
        """Fill the disk of the runs."""
        if "disk" in self.mounted:
            _fill(self.disk / "filler", DISK_MB)

    def free_disk(self) -> None:
        """Remove the file that fills the disk of the runs."""
        (self.disk / "filler").unlink(missing_ok=True)

    def damage_home(self, way: str) -> None:
        """Make the file system of the clients' state, caches and settings full or read-only."""
        if "home" not in self.mounted:
            return
        if way == "full":
            _fill(self.home / "filler", HOME_MB)
            return
        deadline = time.monotonic() + 3  # a file that is open for writing delays the change
        while self._remount_home("ro") and time.monotonic() < deadline:
            time.sleep(0.05)

    def repair_home(self) -> None:
        """Make the home writable, with room."""
        if "home" in self.mounted:
            self._remount_home("rw")
        (self.home / "filler").unlink(missing_ok=True)

    def _remount_home(self, mode: str) -> int:
        words = ["mount", "-o", f"remount,{mode}", str(self.home)]
        return subprocess.run(words, capture_output=True, check=False).returncode

    def prepare_jobs(self, faults: Sequence[Fault], earlier_runs: Sequence[str]) -> None:
        """Let faults reach the processes of all jobs from the first line of their scripts.

        Args:
            faults: the faults of a schedule.
            earlier_runs: the names of runs that an earlier version submits, whose scripts are spared.
        """
        lines = [f"export {variable}\n" for variable in self.job_variables(faults)]
        (self.root / "task-environment").write_text("".join(lines))
        (self.root / "earlier-runs").write_text("".join(f"{name}\n" for name in earlier_runs))

    def job_variables(self, faults: Sequence[Fault]) -> tuple[str, ...]:
        """Return the variables that let faults reach the processes of a job."""
        env: dict[str, str] = {}
        for fault in faults:
            more = {}
            if fault.kind in UNSTEADY:
                more = preload.trouble_disk(self.disk / "runs", self.switch, self.root)
            elif fault.kind == "N20":
                more = preload.skew_clock(float(fault.target), self.root)
            libraries = [item["LD_PRELOAD"] for item in (env, more) if "LD_PRELOAD" in item]
            env |= {**more, "LD_PRELOAD": ":".join(libraries)} if more else {}
        return tuple(f"{name}={value}" for name, value in env.items())

    def spoil(self, program: str, way: str) -> None:
        """Let a program of Slurm misbehave for all clients."""
        (self.shims / f"{program}.fault").write_text(f"{way}\n")

    def mend(self, program: str) -> None:
        """Remove the fault of a program of Slurm."""
        (self.shims / f"{program}.fault").unlink(missing_ok=True)

    def _write_shims(self) -> None:
        self.shims.mkdir()
        before = self.lab.inside([]) if isinstance(self.lab, NetworkLab) else []
        for program in (*PROGRAMS, "sinfo", "srun", "sacct", "sacctmgr"):
            real = shutil.which(program, path=self.lab.env["PATH"])
            if real is not None:
                path = self.shims / program
                path.write_text(SHIM.replace("REAL", shlex.join([*before, real])))
                path.chmod(0o755)

    def _enter(self) -> None:
        os.environ.update(self.lab.env)
        os.environ["PATH"] = f"{self.shims}:{self.lab.env['PATH']}"
        for name, folder in {
            "DTSLURM_RUN_ROOT": self.disk / "runs",
            "XDG_STATE_HOME": self.home / "state",
            "XDG_CACHE_HOME": self.home / "cache",
            "XDG_CONFIG_HOME": self.home / "config",
        }.items():
            os.environ[name] = str(folder)

    def reset(self) -> None:
        """Cancel all jobs and wait until every node is idle, before the next schedule."""
        self.lab.run(["scancel", "--user", self.lab.user], check=False)
        for name in NODES:
            self.lab.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        Path(supervisor_file(str(self.disk / "runs"))).unlink(missing_ok=True)
        shutil.rmtree(self.home / "state" / "dtslurm" / "nodes", ignore_errors=True)
        self.lab.wait_for("jobs", lambda: not self.lab.run(["squeue", "-h"], check=False).stdout.strip(), 40)
        self.lab.wait_idle(40)


@contextmanager
def site(*, networked: bool) -> Iterator[Site]:
    """Start a site, and stop it at the end."""
    networked = networked and network.possible()
    root = Path(tempfile.mkdtemp(prefix="nemesis-", dir="/tmp"))
    mounted = [
        folder for folder, size in (("disk", DISK_MB), ("home", HOME_MB)) if _mount(root / folder, size)
    ]
    try:
        conf = _conf(root)
        kind = partial(NetworkLab) if networked else partial(SlurmLab, gpus=0)
        with kind(root / "lab", nodes=len(NODES), extra_conf=conf) as lab:
            made = Site(root, lab, mounted)
            made._write_shims()
            made._enter()
            yield made
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", root / folder], check=False)
        shutil.rmtree(root, ignore_errors=True)


def _mount(folder: Path, size_mb: int) -> bool:
    """Create a folder, and mount a small file system there; return whether that was possible."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and not subprocess.run(words, check=False).returncode


def _fill(path: Path, size_mb: int) -> None:
    """Leave no free byte in a file system of this size, by a file at this path."""
    filler = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        size = size_mb << 20
        while size >= 4096:
            try:
                os.posix_fallocate(filler, os.fstat(filler).st_size, size)
            except OSError:
                size //= 2
    finally:
        os.close(filler)


def _extract_earlier_version(folder: Path) -> Path | None:
    """Extract the package of the commit `EARLIER`; return None if this clone does not have the commit."""
    words = ["git", "-C", str(ROOT), "archive", EARLIER, "dtslurm", "templates", "cluster_profiles"]
    archive = subprocess.run(words, capture_output=True, check=False)
    if archive.returncode:
        return None
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def _conf(root: Path) -> list[str]:
    prolog = root / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {root}/prolog-fails ]\n")
    prolog.chmod(0o755)
    task_prolog = root / "task-prolog"
    task_prolog.write_text(TASK_PROLOG.replace("FOLDER", str(root)))
    task_prolog.chmod(0o755)
    return [
        f"Prolog={prolog}",
        f"TaskProlog={task_prolog}",
        "MessageTimeout=4",
        "SlurmdTimeout=6",
        "KillWait=2",
        "SelectTypeParameters=CR_Core_Memory,CR_LLN",  # runs on all nodes, so that each fault hits one
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1 GraceTime=2",
        "PartitionName=urgent Nodes=ALL MaxTime=1-00:00:00 State=UP PriorityTier=9 PreemptMode=OFF",
    ]
