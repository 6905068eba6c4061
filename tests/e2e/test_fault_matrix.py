"""Each fault at each step of a submission over SSH: at most one job, and a record of the result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtslurm.model.runs.state import JobState
from dtslurm.services.runs.runs import recent
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from tests.e2e.conftest import far_profile
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software
from tests.sshd.servers import Server, SshLab, ssh_lab
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = ("intent", "sending", "placed", "queued")
FAULTS = ("client killed", "link cut", "controller down", "disk full")

# The client, stopping where it is told: when its intent is on disk, and in the middle of what it sends.
CLIENT = """
import pathlib, sys, time
from dtslurm.services.submit import submit as service
from dtslurm.services.wiring.context import Context
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.request.request import JobRequest
from dtslurm.remote.remote_worker import RemoteWorker

marks = pathlib.Path(sys.argv[1])
step = (marks / "step").read_text()

def stop_at(name):
    if name == step:
        (marks / "at").touch()
        while not (marks / "go").exists():
            time.sleep(0.02)

deliver = service.deliver

def watched(*args, **options):
    stop_at("intent")
    return deliver(*args, **options)

ask = RemoteWorker.ask

def slowly(worker, parts, **options):
    def pieces():
        for number, piece in enumerate(parts):
            yield piece
            if number == 0:
                stop_at("sending")
    return ask(worker, pieces(), **options)

RemoteWorker.ask = slowly
service.deliver = watched
context = Context()
request = JobRequest(script="train.py", cluster="far", time="5", no_check=True)
print(service.submit(context, prepare(context, request, standalone=False)).job_id)
"""

# sbatch on the login node, stopping before it queues the job and before it answers.
SBATCH = """\
#!/bin/sh
stop() {{
  [ "$(cat {marks}/step)" = "$1" ] || return 0
  touch {marks}/at
  while [ ! -e {marks}/go ]; do sleep 0.05; done
}}
stop placed
answer=$({sbatch} "$@")
code=$?
stop queued
printf '%s\\n' "$answer"
exit "$code"
"""


PLACEHOLDER = "takes-an-id"
MOST_FORGOTTEN = 5  # jobs that a controller may not have saved yet: it does so every few seconds


class Disk:
    """A small file system of its own, which can be filled."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)

    def fill(self) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def gone(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)


@dataclass
class Site:
    """A cluster, its login node and the folder of marks that stop things."""

    lab: SlurmLab
    ssh: SshLab
    login: Server
    marks: Path
    disk: Disk
    told: dict[tuple[str, str], str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def site(
    slurm_software: Software,
    sshd_software: None,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("m")
    marks, shims = root / "marks", root / "bin"
    marks.mkdir()
    shims.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    disk = Disk(root / "disk")  # before the cluster, whose nodes would not see it
    with SlurmLab(root / "lab", nodes=1, software=slurm_software) as lab, ssh_lab() as ssh:
        sbatch = shutil.which("sbatch", path=lab.env["PATH"]) or "/usr/bin/sbatch"
        (shims / "sbatch").write_text(SBATCH.format(marks=marks, sbatch=sbatch))
        (shims / "sbatch").chmod(0o755)
        env = {**lab.env, "PATH": f"{shims}:{lab.env['PATH']}", "HOME": str(ssh.home("login"))}
        made = Site(lab, ssh, ssh.server("login", env=env), marks, disk)
        yield made
    disk.gone()
    _print_table(pytestconfig, made.told)


def _print_table(config: pytest.Config, told: dict[tuple[str, str], str]) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None or capture is None or not told:
        return
    widths = [max(len(fault), *(len(told.get((step, fault), "-")) for step in STEPS)) for fault in FAULTS]
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        for name, cells in [
            ("fault when", FAULTS),
            *((step, tuple(told.get((step, fault), "-") for fault in FAULTS)) for step in STEPS),
        ]:
            row = " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            reporter.write_line(f"{name:<10} | {row}")


@dataclass
class Trial:
    """One submission, stopped at a step, hit by a fault, and looked at when all is well again."""

    site: Site
    project: Path
    runs: Path
    restarted: bool = False

    def start(self, step: str) -> subprocess.Popen[str]:
        for name in ("at", "go"):
            (self.site.marks / name).unlink(missing_ok=True)
        (self.site.marks / "step").write_text(step)
        client = self.project.parent / "client.py"
        client.write_text(CLIENT)
        process = subprocess.Popen(
            [sys.executable, str(client), str(self.site.marks)],
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until((self.site.marks / "at").exists, f"the step {step}")
        return process

    def hit(self, fault: str, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Let the fault happen, let everything go on, mend what was broken; return what the client said."""
        faults: dict[str, Callable[[], None]] = {
            "client killed": process.kill,
            "link cut": self.site.login.cut,
            "controller down": self.site.lab.kill_controller,
            "disk full": self.site.disk.fill,
        }
        faults[fault]()
        (self.site.marks / "go").touch()
        output = process.communicate(timeout=600)
        if fault == "controller down":
            self.site.lab.start_controller()
            self.site.lab.run(["scancel", f"--name={PLACEHOLDER}"], check=False)  # it may have come back
            self.restarted = True
        self.site.disk.free()
        return output

    def queue(self) -> str:
        """Return what is queued: job, state and reason, a line each."""
        return str(self.site.lab.run(["squeue", "-h", "-o", "%i %T %r"], check=False).stdout.strip())

    def drain(self, limit: float = 90) -> None:
        end = time.monotonic() + limit
        while left := self.queue():
            assert time.monotonic() < end, f"jobs did not end in {limit:g} s: {left}"
            time.sleep(0.05)

    def settle(self) -> list[RunView]:
        """Return what the next look a while later tells of the run."""
        context = Context(cwd=self.project)
        context.clock = lambda: time.time() + 250
        self.drain(200)
        seen = views(context, recent(context, 5))
        self.drain()
        return seen


@pytest.fixture
def trial(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    place = site.disk.folder / tmp_path.name  # the cluster's files and this machine's, on one small disk
    place.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in site.ssh.env.items():
        monkeypatch.setenv(name, value)
    far_profile(tmp_path, "login", root=place / "runs")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(f"open({str(tmp_path / 'worked')!r}, 'a').write('x')\n")
    (project / "filler.bin").write_bytes(os.urandom(300_000))  # so that there is a middle of the transfer
    made = Trial(site, project, place / "runs")
    yield made
    if made.restarted:
        # A controller that forgot jobs gives their ids once more, and the node ends the second job of an id.
        for _ in range(MOST_FORGOTTEN):
            site.lab.run(
                ["sbatch", "--hold", "-J", PLACEHOLDER, "-o", "/dev/null", "--wrap=true"], check=False
            )
        # It may also have taken its node out of service meanwhile.
        site.lab.run(["scontrol", "update", "nodename=n1", "state=resume"], check=False)
    site.lab.run(["scancel", "--user", site.lab.user], check=False)  # what is stuck is of this trial alone
    made.drain()
    shutil.rmtree(place)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
def test_f1_f2_f5_f16_fault_at_any_step_leaves_at_most_a_single_job(
    trial: Trial, tmp_path: Path, step: str, fault: str
) -> None:
    process = trial.start(step)
    out, err = trial.hit(fault, process)
    seen = trial.settle()
    worked = tmp_path / "worked"
    bodies = len(worked.read_text()) if worked.exists() else 0
    phases = [view.record.phase for view in seen]
    states = [view.statuses[0].state for view in seen]
    trial.site.told[step, fault] = _outcome(bodies, phases, states)

    assert bodies <= 1
    assert process.returncode in {0, -9} or "rror" in err
    if process.returncode == 0:
        assert [view.record.job_id for view in seen] == [out.strip()]
    if bodies:
        assert phases == ["submitted"], err
    elif process.returncode == 0 and fault == "disk full":  # its script found no room for its own files
        assert (phases, states) == (["submitted"], [JobState.FAILED])
    elif process.returncode == 0:
        # A controller killed right after its answer forgets the job (22.05), or knows it as queued
        # while the node has it already: the second launch is refused and the job cancelled, or srun is
        # refused because the job is unknown to the controller, or waits, as that believes.
        assert (fault, phases) == ("controller down", ["submitted"])
        [log] = [path.read_text() for path in trial.runs.glob("*/logs/batch.log")] or [""]
        refused = [JobState.FAILED] if "Unable to confirm allocation" in log else [JobState.CANCELLED]
        assert states in ([JobState.UNKNOWN], [JobState.CANCELLED], refused), log
    else:
        assert phases in ([], ["withdrawn"]), err
    left = [path for path in (trial.runs).glob("*") if not path.name.startswith(".")]
    assert len(left) <= 1
    assert all(json.loads((path / "job.json").read_text()) for path in left)


def test_f2_job_requeued_by_a_controller_that_lost_its_state_trains_once(
    trial: Trial, tmp_path: Path
) -> None:
    process, worked = trial.start("queued"), tmp_path / "worked"
    wait_until(worked.exists, "training")
    trial.hit("controller down", process)
    [seen] = trial.settle()
    assert worked.read_text() == "x"
    assert seen.record.phase == "submitted"
    # A controller that remembers the job as running, on a node that ended it meanwhile, calls it NODE_FAIL.
    ends = {JobState.COMPLETED, JobState.CANCELLED, JobState.NODE_FAIL, JobState.UNKNOWN}
    assert seen.statuses[0].state in ends


def _outcome(bodies: int, phases: list[str], states: list[JobState]) -> str:
    record = phases[0] if phases else "no record"
    state = f", {states[0].value}" if states and not bodies else ""
    return f"{bodies} job{'' if bodies == 1 else 's'}, {record}{state}"
