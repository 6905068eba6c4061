"""The load that waiting for a job puts on the scheduler: Slurm commands and controller requests per minute.

The benchmark starts a Slurm and waits for a running job with each of these methods: one and five processes of
`dtslurm logs -f`, a loop around `dtslurm status`, submitit's `result()`, torchx's `wait()`, and a loop around
`squeue --me`, as many dashboards use it. Wrappers around the Slurm commands count the calls, and `sdiag`
counts the requests to the controller. Requests to the accounting daemon (`sacct`) are counted only as calls.
The first 15 seconds of each method are not counted, because every method queries the state of a new job more
often.

Run it with ``python -m benchmarks.requests [--seconds N]``.
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

from benchmarks.charts import Bar, Chart, print_charts
from benchmarks.peers import PeerMissing, environment
from tests.lab.cluster import SlurmLab

QUERIES = r"JOB_USER_INFO|JOB_INFO\w*|PARTITION_INFO|NODE_INFO\w*|FED_INFO"
COUNT = re.compile(rf"REQUEST_(?:{QUERIES})\s.*?count:(\d+)")
PROGRAMS = ("squeue", "sacct", "scontrol", "sinfo", "sbatch")
DTSLURM = [sys.executable, "-m", "dtslurm"]
NULL = subprocess.DEVNULL
WARM_UP_S = 15.0
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


def count_queries(lab: SlurmLab) -> int:
    """Return the number of queries that the controller has received so far."""
    report = lab.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
    return sum(int(number) for number in COUNT.findall(report))


@contextmanager
def wrap_commands(lab: SlurmLab, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Write wrappers that record each call of a Slurm command; yield their folder and the file of calls."""
    programs, calls = folder / "wrappers", folder / "calls"
    programs.mkdir()
    for name in PROGRAMS:
        path = programs / name
        path.write_text(f'#!/bin/sh\necho {name} >>{calls}\nexec {lab.program(name)} "$@"\n')
        path.chmod(0o755)
    calls.touch()
    yield programs, calls


class LoadMeter:
    """Measures the calls and requests of methods that wait for a job, one method after the other."""

    def __init__(
        self, lab: SlurmLab, folder: Path, env: dict[str, str], calls_file: Path, seconds: float
    ) -> None:
        self.lab, self.folder, self.env, self.calls_file, self.seconds = lab, folder, env, calls_file, seconds
        self.calls: list[Bar] = []
        self.requests: list[Bar] = []

    def measure(self, name: str, argv: Sequence[str], processes: int = 1) -> None:
        """Run a number of processes of a method, and add bars with its calls and requests per minute."""
        with ExitStack() as stack:
            log = stack.enter_context((self.folder / "stderr").open("w+"))
            running = []
            for _ in range(processes):
                process = subprocess.Popen(
                    list(argv), env=self.env, cwd=self.folder, stdin=NULL, stdout=NULL, stderr=log
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                running.append(process)
            time.sleep(WARM_UP_S)
            calls, requests, start = len(self._calls()), count_queries(self.lab), time.monotonic()
            time.sleep(self.seconds)
            minutes = (time.monotonic() - start) / 60
            exit_codes = [process.poll() for process in running]
            if any(code is not None for code in exit_codes):
                log.seek(0)
                lines = log.read().strip().splitlines() or [f"ended with {exit_codes}"]
                return self.add_failure(name, lines[-1][:200])
            calls_per_minute = (len(self._calls()) - calls) / minutes
            requests_per_minute = (count_queries(self.lab) - requests) / minutes
        self.calls.append(Bar(name, calls_per_minute, calls_per_minute, calls_per_minute))
        self.requests.append(Bar(name, requests_per_minute, requests_per_minute, requests_per_minute))
        return None

    def add_failure(self, name: str, reason: str) -> None:
        """Add bars for a method that failed."""
        for bars in (self.calls, self.requests):
            bars.append(Bar(name, None, note=reason))

    def _calls(self) -> list[str]:
        return self.calls_file.read_text().split()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with (
        tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name,
        SlurmLab(Path(name), accounting=True) as lab,
        wrap_commands(lab, Path(name)) as (programs, calls_file),
    ):
        folder = Path(name) / "user"
        folder.mkdir()
        variables = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
        variables |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
        env = {**lab.environ(), **variables}
        env["PATH"] = f"{programs}:{env['PATH']}"
        (folder / "train.py").write_text("import time; time.sleep(3600)\n")
        submit = [*DTSLURM, "submit", "--parsable", "-t", "60", "train.py"]
        submission = subprocess.run(submit, env=env, capture_output=True, text=True, check=True, cwd=folder)
        job_id = submission.stdout.strip()
        while "RUNNING" not in lab.run(["squeue", "-h", "-o", "%T"]).stdout:
            time.sleep(0.2)
        meter = LoadMeter(lab, folder, env, calls_file, seconds)
        follow = [*DTSLURM, "logs", "-f", job_id]
        status_loop = f"while {' '.join(DTSLURM)} status >/dev/null; do sleep 2; done"
        meter.measure("dtslurm logs -f, 1 process", follow)
        meter.measure("dtslurm logs -f, 5 processes", follow, 5)
        meter.measure("dtslurm status every 2 s", ["sh", "-c", status_loop])
        for tool, method, text in (
            ("submitit", "submitit result()", SUBMITIT),
            ("torchx", "torchx wait()", TORCHX),
        ):
            try:
                meter.measure(method, [str(environment(tool) / "bin" / "python"), "-c", text])
            except PeerMissing as error:
                meter.add_failure(method, str(error))
        meter.measure("squeue --me every 2 s", ["sh", "-c", "while squeue --me >/dev/null; do sleep 2; done"])
        lab.run(["scancel", "--user", lab.run(["id", "-un"]).stdout.strip()])
    print_charts(
        [
            Chart("Calls of Slurm commands", "per minute", "", tuple(meter.calls)),
            Chart("Requests to the controller", "per minute", "", tuple(meter.requests)),
        ]
    )


if __name__ == "__main__":
    main()
