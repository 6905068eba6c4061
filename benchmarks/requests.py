"""What waiting for a job costs the scheduler: calls of Slurm's programs and requests a minute, beside peers.

``python -m benchmarks.requests [--seconds N]`` brings up a Slurm of its own, and has each way wait for a job:
one window and five of dtslurm's, submitit's `result()`, torchx's `wait()`, and a plain loop as dashboards
have it. Calls are counted by stand-ins before Slurm's programs, requests to the controller by `sdiag`.
What asks the accounting daemon (`sacct`) is in the calls alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.figures import Bar, Chart, show
from benchmarks.peers import PeerMissing, environment
from tests.lab.cluster import SlurmLab

QUESTIONS = r"JOB_USER_INFO|JOB_INFO\w*|PARTITION_INFO|NODE_INFO\w*|FED_INFO"
COUNT = re.compile(rf"REQUEST_(?:{QUESTIONS})\s.*?count:(\d+)")
PROGRAMS = ("squeue", "sacct", "scontrol", "sinfo", "sbatch")
DTSLURM = [sys.executable, "-m", "dtslurm"]
NULL = subprocess.DEVNULL
BEGINNING_S = 15.0  # every way asks more often while a job is young
SUBMITIT = """
import submitit, time
executor = submitit.SlurmExecutor("submitit")
executor.update_parameters(time=60)
executor.submit(time.sleep, 3600).result()
"""
TORCHX = """
from torchx.runner import get_runner
with get_runner() as runner:
    handle = runner.run_component("utils.sh", ["sleep", "3600"], scheduler="slurm", cfg={"time": "60"})
    runner.wait(handle)
"""


def asked(lab: SlurmLab) -> int:
    """Return how many questions the controller has had."""
    told = lab.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
    return sum(int(number) for number in COUNT.findall(told))


@contextmanager
def stand_ins(lab: SlurmLab, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Put programs that note each call before Slurm's; yield their folder and the file of notes."""
    programs, notes = folder / "counted", folder / "calls"
    programs.mkdir()
    for name in PROGRAMS:
        path = programs / name
        path.write_text(f'#!/bin/sh\necho {name} >>{notes}\nexec {lab.program(name)} "$@"\n')
        path.chmod(0o755)
    notes.touch()
    yield programs, notes


class Watch:
    """Counts what ways of waiting ask, one after the other."""

    def __init__(self, lab: SlurmLab, folder: Path, env: dict[str, str], notes: Path, seconds: float) -> None:
        self.lab, self.folder, self.env, self.notes, self.seconds = lab, folder, env, notes, seconds
        self.calls: list[Bar] = []
        self.requests: list[Bar] = []

    def minute(self, name: str, argv: Sequence[str], windows: int = 1) -> None:
        """Have so many windows run; note their calls and the controller's requests in a minute."""
        with ExitStack() as stack:
            log = stack.enter_context((self.folder / "said").open("w+"))
            running = []
            for _ in range(windows):
                process = subprocess.Popen(
                    list(argv), env=self.env, cwd=self.folder, stdin=NULL, stdout=NULL, stderr=log
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                running.append(process)
            time.sleep(BEGINNING_S)
            calls, requests, begin = len(self._notes()), asked(self.lab), time.monotonic()
            time.sleep(self.seconds)
            minutes = (time.monotonic() - begin) / 60
            ended = [process.poll() for process in running]
            if any(code is not None for code in ended):
                log.seek(0)
                said = (log.read().strip().splitlines() or [f"ended with {ended}"])[-1][:200]
                return self.missing(name, said)
            called = (len(self._notes()) - calls) / minutes
            told = (asked(self.lab) - requests) / minutes
        self.calls.append(Bar(name, called, called, called))
        self.requests.append(Bar(name, told, told, told))
        return None

    def missing(self, name: str, why: str) -> None:
        """Note that a way does not work."""
        for bars in (self.calls, self.requests):
            bars.append(Bar(name, None, note=why))

    def _notes(self) -> list[str]:
        return self.notes.read_text().split()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with (
        tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name,
        SlurmLab(Path(name), accounting=True) as lab,
        stand_ins(lab, Path(name)) as (programs, notes),
    ):
        folder = Path(name) / "user"
        folder.mkdir()
        own = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
        own |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
        env = {**lab.environ(), **own}
        env["PATH"] = f"{programs}:{env['PATH']}"
        (folder / "train.py").write_text("import time; time.sleep(3600)\n")
        submit = [*DTSLURM, "submit", "--parsable", "-t", "60", "train.py"]
        done = subprocess.run(submit, env=env, capture_output=True, text=True, check=True, cwd=folder)
        job = done.stdout.strip()
        while "RUNNING" not in lab.run(["squeue", "-h", "-o", "%T"]).stdout:
            time.sleep(0.2)
        watch = Watch(lab, folder, env, notes, seconds)
        follow = [*DTSLURM, "logs", "-f", job]
        looks = f"while {' '.join(DTSLURM)} status >/dev/null; do sleep 2; done"
        watch.minute("dtslurm logs -f, 1 window", follow)
        watch.minute("dtslurm logs -f, 5 windows", follow, 5)
        watch.minute("dtslurm status every 2 s", ["sh", "-c", looks])
        for tool, way, text in (
            ("submitit", "submitit result()", SUBMITIT),
            ("torchx", "torchx wait()", TORCHX),
        ):
            try:
                watch.minute(way, [str(environment(tool) / "bin" / "python"), "-c", text])
            except PeerMissing as error:
                watch.missing(way, str(error))
        watch.minute("squeue --me every 2 s", ["sh", "-c", "while squeue --me >/dev/null; do sleep 2; done"])
        lab.run(["scancel", "--user", lab.run(["id", "-un"]).stdout.strip()])
    show(
        [
            Chart("Calls of Slurm's programs", "a minute", "", tuple(watch.calls)),
            Chart("Requests to the controller", "a minute", "", tuple(watch.requests)),
        ]
    )


if __name__ == "__main__":
    main()
