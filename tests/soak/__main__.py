"""``python -m tests.soak [--seconds N]``: compressed life on a cluster, here and over SSH, and its leaks.

Each round submits, watches, follows logs, looks at ``top``, cancels, requeues; some rounds clean up. One
process stays for all rounds, as a notebook does, and so does a dashboard on a terminal; the rest is done
by commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil

import dtslurm
from dtslurm.model.runs.state import JobState
from dtslurm.services.runs.clean import LEAST_AGE_S, clean
from dtslurm.services.wiring.context import Context
from tests import robustness
from tests.e2e.conftest import far_profile
from tests.lab import keeper
from tests.lab.cluster import SlurmLab
from tests.soak.dashboard import OpenDashboard
from tests.soak.leaks import Sample, growth, leaks
from tests.sshd.servers import Server, ssh_lab

SCRIPT = "import time\nfor step in range(5):\n    print('step', step, flush=True)\n    time.sleep(0.2)\n"


class Life:
    """A user of two clusters, which are one Slurm: at its login node, and over SSH."""

    def __init__(
        self, root: Path, lab: SlurmLab, login: Server, homes: Sequence[Path], dashboard: OpenDashboard
    ) -> None:
        self.root, self.lab, self.login, self.homes = root, lab, login, homes
        self.dashboard = dashboard
        self.project = root / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        os.chdir(self.project)
        self.samples: list[Sample] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def live(self, seconds: float, rounds: int) -> None:
        """Live rounds until the time is over, but so many at least."""
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end or number < rounds:
            self._round(number)
            self.samples.append(self._sample())
            number += 1

    def _round(self, number: int) -> None:
        if number % 5 == 4:
            self.clean()
        near = dtslurm.submit("train.py", cluster="slurm", time="5", requeue=True)
        far = dtslurm.submit("train.py", cluster="far", time="5", max_restarts=1 if number % 3 == 0 else None)
        doomed = dtslurm.submit("train.py", cluster=("slurm", "far")[number % 2], time="5")
        self.done.update(submit=3)
        self._command("status", "--json")
        lines = [line.text for line in far.logs(follow=True)]
        if [text for text in lines if "step" in text] != [f"step {step}" for step in range(5)]:
            self.wrong.append(f"round {number}: the log of {far.id} was {lines}")
        self.done.update(follow=1)
        doomed.cancel()
        self.done.update(cancel=1)
        self._end(near, far)
        by_hand = self._command(
            "submit", "--cluster", ("far", "slurm")[number % 2], "-t", "5", "--parsable", "train.py"
        )
        self._command(*(("top", "--once") if number % 2 else ("logs", "-f", by_hand.strip())))
        self.dashboard.visit_a_page()
        self.done.update(dashboard=1)
        if number % 4 == 1:
            near.requeue()
            self.done.update(requeue=1)
            self._end(near)
        self._end(dtslurm.Job.find(by_hand.strip()))

    def _end(self, *jobs: dtslurm.Job) -> None:
        """Wait until jobs have done what they should; asking more often than those do who have time."""
        end = time.monotonic() + 180
        while not all(job.done for job in jobs) and time.monotonic() < end:
            time.sleep(0.3)
        self.wrong += [f"{job!r} is {job.state.value}" for job in jobs if job.state is not JobState.COMPLETED]

    def _command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dtslurm", *words],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            self.wrong.append(f"{' '.join(words)}: {done.returncode} {done.stderr[-500:]}")
        self.done[words[0]] += 1
        return done.stdout

    def clean(self) -> None:
        """Remove all that has ended, as if a day had gone by."""
        ahead = Context(clock=lambda: time.time() + 2 * LEAST_AGE_S)
        result = clean(ahead, older_than=LEAST_AGE_S, whole_runs=True, outputs=True, remove=True)
        self.wrong += [f"clean: {words}" for root in result for words in root.trouble]
        self.done.update(clean=1)

    def _sample(self) -> Sample:
        own = psutil.Process()
        ours = self._ours()
        return Sample(
            memory_mib=own.memory_info().rss / 2**20,
            files=own.num_fds(),
            threads=own.num_threads(),
            children=len([item for item in own.children(recursive=True) if item.pid in ours]),
            connections=len(self.login.connections()),
            far=len([pid for pid in ours if pid not in {item.pid for item in own.children(recursive=True)}]),
            dashboard_mib=self.dashboard.memory_mib(),
            state=sum(1 for folder in self._folders() for _ in _files(folder)),
        )

    def _ours(self) -> set[int]:
        """Processes of ours that are no part of the cluster itself, nor of its jobs."""
        daemons = {"munged", "slurmctld", "slurmd", "slurmstepd"}
        names = set()
        for pid in keeper.marked(self.lab.token):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if (
                    pid != os.getpid()
                    and process.name() not in daemons
                    and "SLURM_JOB_ID" not in process.environ()
                ):
                    names.add(pid)
        return names

    def _folders(self) -> list[Path]:
        return [self.root / "state", self.root / "cache", *self.homes]

    def left(self) -> list[str]:
        """End everything and return what is left that should not be."""
        end = time.monotonic() + 60
        result: list[str] = []
        while time.monotonic() < end:
            self.clean()
            runs = [path for root in ("runs", "far-runs") for path in (self.root / root).glob("*")]
            result = [f"run {path.name}" for path in runs if not path.name.startswith(".")]
            result += [
                f"temporary {path}" for folder in self._folders() for path in _files(folder) if _is_odd(path)
            ]
            if not result:
                break
            time.sleep(1)
        return result


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        if "remote" not in Path(parent).parts:  # copies of far runs' files go with the runs
            yield from (Path(parent, name) for name in names)


def _is_odd(path: Path) -> bool:
    return path.suffix in {".tmp", ".part"} or ".unfinished" in path.name or path.name.endswith("-journal")


@contextmanager
def life() -> Iterator[Life]:
    """Bring up a cluster and its login node."""
    root = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        lab = stack.enter_context(SlurmLab(root / "lab", nodes=2, gpus=0))
        ssh = stack.enter_context(ssh_lab())
        home = ssh.home("login")
        login = ssh.server("login", env={**lab.env, "HOME": str(home)})
        os.environ.update(lab.env)
        os.environ.update(ssh.env)
        for name in ("state", "cache", "config"):
            os.environ[f"XDG_{name.upper()}_HOME"] = str(root / name)
        os.environ["DTSLURM_RUN_ROOT"] = str(root / "runs")
        far_profile(root, "login", root=root / "far-runs")
        dashboard = stack.enter_context(closing(OpenDashboard()))
        yield Life(root, lab, login, [home], dashboard)
        os.chdir("/")


def main() -> int:
    """Live for a while; return 1 if something leaks or went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rounds", type=int, default=4, help="at least")
    parser.add_argument("--record", action="store_true", help="for the site")
    args = parser.parse_args()
    begin = time.time()
    with life() as user:
        user.live(args.seconds, args.rounds)
        result = [*leaks(user.samples), *user.dashboard.problems(), *user.left(), *user.wrong]
    values = {
        "rounds": len(user.samples),
        "done": dict(user.done),
        "held": {
            name: [round(before, 1), round(after, 1)]
            for name, (before, after) in growth(user.samples).items()
        },
        "found": result,
    }
    print(json.dumps(values, indent=1))
    if args.record:
        robustness.write("soak", values, time.time() - begin)
    return int(bool(result))


if __name__ == "__main__":
    sys.exit(main())
