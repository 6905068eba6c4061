"""The same runs on the embedded scheduler and on a real Slurm, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.rundir import RunDir
from tests.sshd.fixtures import Login
from tests.waiting import busyness, wait_until
from tests.warm import run_dtslurm

Finished = subprocess.CompletedProcess[str]


# Tests that take long, or say nothing of SSH, run on the two schedulers alone.
WITHOUT_SSH = pytest.mark.parametrize(
    "cli", ["local", pytest.param("slurm", marks=pytest.mark.slurm)], indirect=True
)
ON_SLURM = pytest.mark.parametrize("cli", [pytest.param("slurm", marks=pytest.mark.slurm)], indirect=True)


def events_of(run: RunDir, name: str) -> list[dict[str, Any]]:
    """Return a run's events of this name."""
    return [event for event in run.events() if event["event"] == name]


@dataclass
class Cli:
    """Runs ``dtslurm`` as a user would, in a folder of its own."""

    cluster: str
    folder: Path
    env: dict[str, str]
    started: list[str] = field(default_factory=list)
    prefix: Sequence[str] = ()

    def __call__(self, *words: str, code: int | None = 0, timeout: float = 120) -> Finished:
        done = run_dtslurm(
            words,
            cwd=self.folder,
            env={**os.environ, **self.env},
            timeout=timeout * busyness(),
            prefix=self.prefix,
        )
        if code is not None:
            assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def python(self, text: str, *, code: int | None = 0, path: str = "") -> dict[str, Any]:
        """Run a program; return the JSON object that it prints last, and its stderr."""
        done = subprocess.run(
            [sys.executable, self.script(text, "main.py"), self.cluster],
            cwd=self.folder,
            env={**os.environ, **self.env, **({"PYTHONPATH": path} if path else {})},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if code is not None:
            assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return {**(json.loads(lines[-1]) if lines else {}), "stderr": done.stderr}

    def submit(self, *words: str) -> str:
        job = self("submit", "--cluster", self.cluster, "--parsable", "-t", "10", *words).stdout.strip()
        self.started.append(job)
        return job

    def recorded_runs(self) -> list[dict[str, Any]]:
        """Return the runs of this project: `status` also shows what other tests have in the same queue."""
        runs: list[dict[str, Any]] = json.loads(self("status", "--json").stdout)["runs"]
        return [run for run in runs if not run["record_problem"]]

    def status(self, job: str) -> dict[str, Any]:
        run: dict[str, Any] = json.loads(self("status", "--json", job).stdout)["runs"][0]
        return run

    def state(self, job: str) -> str:
        return ",".join(sorted({item["state"] for item in self.status(job)["statuses"]}))

    def run_dir(self, job: str) -> RunDir:
        return RunDir(Path(self.status(job)["record"]["run_dir"]))

    def wait_until(self, condition: Callable[[], object], limit: float = 120) -> None:
        """Return when `condition` holds; if it does not, the error has the state and output of every job."""
        try:
            wait_until(condition, limit=limit)
        except AssertionError as error:
            found = [str(error)]
            for job in self.started:
                for command in ("status", "logs"):
                    done = self(command, job, code=None)
                    found.append(f"{command} {job}: {done.returncode}\n{done.stdout}\n{done.stderr}")
            raise AssertionError("\n".join(found)) from None

    def wait_for_end(self, job: str, limit: float = 120) -> dict[str, Any]:
        """Wait for the end of every task and return the status."""
        seen: dict[str, Any] = {}

        def over() -> bool:
            seen.update(self.status(job))
            states = {item["state"] for item in seen["statuses"]}
            if states & {"PENDING", "RUNNING", "UNKNOWN", "SUSPENDED"}:
                return False
            # The script has told its end, and the scheduler may still call it by another name.
            return not any(item["source"] == "record" and item["flags"] for item in seen["statuses"])

        self.wait_until(over, limit)
        return seen


FAR_PROFILE = """\
extends: slurm
login:
  host: {host}
  transport: {transport}
paths:
  run_root: {root}
environment:
  python: {python}
"""


def far_profile(tmp_path: Path, host: str, transport: str = "openssh", root: Path | None = None) -> None:
    """Describe a cluster that is reached over SSH, as a user's own profile."""
    folder = tmp_path / "config" / "dtslurm" / "cluster_profiles"
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "host": host,
        "transport": transport,
        "root": root or tmp_path / "runs",
        "python": sys.executable,
    }
    (folder / "far.yaml").write_text(FAR_PROFILE.format(**values))


@contextmanager
def command_line(cluster: str, tmp_path: Path, env: dict[str, str]) -> Iterator[Cli]:
    """The command line in a new project; what it has started is cancelled in the end."""
    folder = tmp_path / "project"
    folder.mkdir()
    tool = Cli(cluster, folder, env)
    yield tool
    for job in tool.started:
        tool("cancel", job, code=None)


@pytest.fixture(
    params=[
        "local",
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh]),
    ]
)
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cli]:
    """The command line on the embedded scheduler, on the suite's real Slurm, and over SSH to that."""
    env: dict[str, str] = {
        "DTSLURM_RUN_ROOT": str(tmp_path / "runs"),
        "DTSLURM_LOCAL_STATE": str(tmp_path / "local"),
    }
    if request.param == "local":  # jobs have login shells: the user's start-up files are not for tests
        (tmp_path / "home").mkdir()
        env["HOME"] = str(tmp_path / "home")
    elif request.param == "slurm":
        lab = request.getfixturevalue("slurm_lab")
        env.update(lab.env)
    elif request.param == "far":
        login = request.getfixturevalue("sshd_login")
        env.update(login.env)
        far_profile(tmp_path, login.host)
    with command_line(request.param, tmp_path, env) as tool:
        yield tool


@pytest.fixture
def far(tmp_path: Path, sshd_login: Login) -> Iterator[Cli]:
    """The command line on a machine from which the cluster is reached over SSH."""
    far_profile(tmp_path, sshd_login.host)
    with command_line("far", tmp_path, dict(sshd_login.env)) as tool:
        tool.script("print('hello')")
        yield tool
