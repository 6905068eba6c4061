"""Where schedules are lived: a cluster, a small disk for its runs, Slurm's programs with a fault in them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests import preload
from tests.lab import network
from tests.lab.cluster import SlurmLab
from tests.lab.network import NetworkLab
from tests.nemesis.schedule import NODES, PROGRAMS, Fault

DISK_MB = 96
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


class Site:
    """A cluster and what belongs to it; the environment of this process becomes that of a login node."""

    def __init__(self, root: Path, lab: SlurmLab) -> None:
        self.root, self.lab = root, lab
        self.disk, self.shims, self.flag = root / "disk", root / "bin", root / "prolog-fails"
        self.switch = root / "file-server-trouble"

    def fill_disk(self) -> None:
        """Leave no byte on the disk of the runs."""
        filler = os.open(self.disk / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = DISK_MB << 20
            while size >= 4096:
                try:
                    os.posix_fallocate(filler, os.fstat(filler).st_size, size)
                except OSError:
                    size //= 2
        finally:
            os.close(filler)

    def free_disk(self) -> None:
        """Make room again."""
        (self.disk / "filler").unlink(missing_ok=True)

    def job_variables(self, faults: Sequence[Fault]) -> tuple[str, ...]:
        """Return the variables that let faults reach the processes of a job."""
        env: dict[str, str] = {}
        for fault in faults:
            more = {}
            if fault.kind == "N19":
                more = preload.trouble_disk(self.disk / "runs", self.switch, self.root)
            elif fault.kind == "N20":
                more = preload.skew_clock(float(fault.target), self.root)
            libraries = [one["LD_PRELOAD"] for one in (env, more) if "LD_PRELOAD" in one]
            env |= {**more, "LD_PRELOAD": ":".join(libraries)} if more else {}
        return tuple(f"{name}={value}" for name, value in env.items())

    def spoil(self, program: str, way: str) -> None:
        """Let a program of Slurm misbehave for all clients."""
        (self.shims / f"{program}.fault").write_text(f"{way}\n")

    def mend(self, program: str) -> None:
        """Let it do what it should."""
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
            "XDG_STATE_HOME": self.root / "state",
            "XDG_CACHE_HOME": self.root / "cache",
            "XDG_CONFIG_HOME": self.root / "config",
        }.items():
            os.environ[name] = str(folder)

    def reset(self) -> None:
        """See that nothing runs and every node is there, before the next schedule."""
        self.lab.run(["scancel", "--user", self.lab.user], check=False)
        for name in NODES:
            self.lab.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        self.lab.wait_for("jobs", lambda: not self.lab.run(["squeue", "-h"], check=False).stdout.strip(), 40)
        self.lab.wait_idle(40)


@contextmanager
def site(*, networked: bool) -> Iterator[Site]:
    """Bring a site up, and end it."""
    networked = networked and network.possible()
    root = Path(tempfile.mkdtemp(prefix="nemesis-", dir="/tmp"))
    disk = root / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", disk], check=False
        ).returncode
    )
    try:
        conf = _conf(root)
        kind = partial(NetworkLab) if networked else partial(SlurmLab, gpus=0)
        with kind(root / "lab", nodes=len(NODES), extra_conf=conf) as lab:
            made = Site(root, lab)
            made._write_shims()
            made._enter()
            yield made
    finally:
        if mounted:
            subprocess.run(["umount", "-l", disk], check=False)
        shutil.rmtree(root, ignore_errors=True)


def _conf(root: Path) -> list[str]:
    prolog = root / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {root}/prolog-fails ]\n")
    prolog.chmod(0o755)
    return [
        f"Prolog={prolog}",
        "MessageTimeout=4",
        "SlurmdTimeout=6",
        "KillWait=2",
        "SelectTypeParameters=CR_Core_Memory,CR_LLN",  # runs on all nodes, so that each fault hits one
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1 GraceTime=2",
        "PartitionName=urgent Nodes=ALL MaxTime=1-00:00:00 State=UP PriorityTier=9 PreemptMode=OFF",
    ]
