"""One submission makes one job that works, even if sbatch's answer is lost."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import SubmitUnknown
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.diagnose import diagnose
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.runs import find, recent
from dtslurm.services.runs.status import views
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from tests.disks import small_disk
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


@pytest.fixture
def lab(lab_root: Path, slurm_software: Software, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A cluster of the test's own: its controller may be stopped."""
    with SlurmLab(lab_root, nodes=2, software=slurm_software) as lab:
        for name, value in lab.env.items():
            monkeypatch.setenv(name, value)
        yield lab


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import os\nopen(os.path.dirname(__file__) + '/worked', 'a').write('x')\n"
    )
    return folder


def prepared(project: Path, **options: object) -> tuple[Context, Prepared]:
    context = Context(cwd=project)
    request = JobRequest(script="train.py", cluster="slurm", time="5", **options)  # type: ignore[arg-type]
    return context, prepare(context, request, standalone=False)


def worked_count(project: Path) -> int:
    path = project / "worked"
    return len(path.read_text()) if path.exists() else 0


def lose_the_answer(lab: SlurmLab, context: Context, job: Prepared) -> JobRecord:
    """Submit while the controller is frozen: it will serve the request when it goes on."""
    lab.pause_controller()
    with pytest.raises(SubmitUnknown):
        submit(context, job)
    (record,) = recent(context, 5)
    assert (record.phase, record.job_id) == ("unknown", None)
    return record


def end_state(context: Context, token: str) -> JobState:
    states: list[JobState] = []

    def ended() -> bool:
        (view,) = views(context, [find(context, token)])
        states[:] = [view.statuses[0].state] if view.terminal else []
        return view.terminal

    wait_until(ended, limit=60)
    return states[0]


def settled_record(context: Context, token: str) -> JobRecord:
    records: list[JobRecord] = []

    def settled() -> bool:
        (view,) = views(context, [find(context, token)])
        records[:] = [view.record]
        return view.record.phase not in {"planned", "unknown"}

    wait_until(settled, limit=60)
    return records[0]


def test_f1_job_with_a_lost_sbatch_answer_is_found(lab: SlurmLab, project: Path) -> None:
    context, job = prepared(project)
    record = lose_the_answer(lab, context, job)
    (view,) = views(context, [record])
    assert view.statuses[0].state is JobState.UNKNOWN
    lab.resume_controller()
    assert settled_record(context, record.token).job_id is not None
    assert end_state(context, record.token) is JobState.COMPLETED
    assert worked_count(project) == 1


def test_f3_late_job_of_a_withdrawn_run_does_no_work(lab: SlurmLab, project: Path) -> None:
    """The controller loses the request; the run is withdrawn after a minute; then the job starts."""
    context, job = prepared(project)
    record = lose_the_answer(lab, context, job)
    lab.kill_controller()
    lab.start_controller()
    context.clock = lambda: time.time() + 100
    assert settled_record(context, record.token).phase == "withdrawn"
    (view,) = views(context, [find(context, record.token)])
    assert view.terminal
    assert "you can submit again" in view.statuses[0].reason

    script = RunDir(Path(record.run_dir)).script_path
    late = lab.run(
        ["sbatch", "--wait", "--parsable", f"--comment={record.comment}", str(script)], check=False
    )
    assert late.returncode == 87
    assert worked_count(project) == 0
    log = (Path(record.run_dir) / "logs" / "batch.log").read_text()
    assert "ends without work: its run belongs to withdrawn" in log


def test_f3_second_job_of_a_submission_does_no_work(lab: SlurmLab, project: Path) -> None:
    context, job = prepared(project)
    record = submit(context, job)
    assert end_state(context, record.token) is JobState.COMPLETED
    second = lab.run(["sbatch", "--wait", str(RunDir(Path(record.run_dir)).script_path)], check=False)
    assert second.returncode == 87
    assert worked_count(project) == 1


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run root on a file system in which no file can be made any more, once it is full; mounted before
    nodes start, so that they see it."""
    with small_disk(tmp_path / "disk", "nr_inodes=400") as disk:
        monkeypatch.setenv("DTSLURM_RUN_ROOT", str(disk / "runs"))
        yield disk


def start_on_full_disk(lab: SlurmLab, project: Path, disk: Path) -> tuple[Context, JobRecord]:
    """Submit a job, and let it start when no file can be made in its run directory any more."""
    context, job = prepared(project, sbatch=("--hold",))
    record = submit(context, job)
    (Path(record.run_dir) / "logs" / "batch.log").touch()
    (disk / "filler").mkdir()
    for number in range(1000):
        try:
            (disk / "filler" / str(number)).touch()
        except OSError:
            break
    lab.run(["scontrol", "release", str(record.job_id)])
    return context, record


def test_f16_run_starts_after_its_claim_was_delayed_by_a_full_disk(
    full_disk: Path, lab: SlurmLab, project: Path
) -> None:
    context, record = start_on_full_disk(lab, project, full_disk)
    log = Path(record.run_dir) / "logs" / "batch.log"
    wait_until(lambda: "/claim" in log.read_text(), "the first try", limit=30)
    shutil.rmtree(full_disk / "filler")
    assert end_state(context, record.token) is JobState.COMPLETED
    assert worked_count(project) == 1


def test_f16_run_that_cannot_be_claimed_reports_the_reason(
    full_disk: Path, lab: SlurmLab, project: Path
) -> None:
    context, record = start_on_full_disk(lab, project, full_disk)
    assert end_state(context, record.token) is JobState.FAILED
    assert worked_count(project) == 0
    log = (Path(record.run_dir) / "logs" / "batch.log").read_text()
    assert re.search(r"job \d+ ends without work.*/claim.*No space left on device", log)
    (view,) = views(context, [find(context, record.token)])
    assert view.statuses[0].exit_code == 1  # 87 would say that another job has the run
    diagnosis = diagnose(context, view.record)
    assert any("No space left on device" in line.text for line in diagnosis.verdict.evidence), diagnosis


def test_f3_every_array_task_works(lab: SlurmLab, project: Path) -> None:
    context, job = prepared(project, array="0-3")
    record = submit(context, job)
    assert end_state(context, record.token) is JobState.COMPLETED
    assert worked_count(project) == 4


def test_f6_job_id_reused_by_another_job_is_not_attributed_to_the_run(lab: SlurmLab, project: Path) -> None:
    """A controller killed right after its answer may forget the job and reuse the job id."""
    context, job = prepared(project)
    record = submit(context, job)
    assert end_state(context, record.token) is JobState.COMPLETED
    other = lab.run(["sbatch", "--parsable", "--job-name=other", "--wrap=sleep 60"]).stdout.strip()
    stolen = JobRecord(
        token="0123456789ab", cluster="slurm", name="mine", run_dir=record.run_dir, phase="submitted",
        created_at=time.time(), profile=record.profile, job_id=other,
    )  # fmt: skip
    (view,) = views(Context(cwd=project), [stolen])
    assert view.statuses[0].state is not JobState.RUNNING
    assert not view.trouble


def test_f6_job_with_another_token_is_not_attributed_to_the_run(lab: SlurmLab, project: Path) -> None:
    context, job = prepared(project)
    record = submit(context, job)
    other = lab.run(
        [
            "sbatch",
            "--parsable",
            "--job-name=train",
            "--comment=dtslurm:ffffffffffff:000000000000",
            "--wrap=sleep 60",
        ]
    ).stdout.strip()
    stolen = JobRecord(
        token="0123456789ab", cluster="slurm", name="train", run_dir=str(project), phase="submitted",
        created_at=time.time(), profile=record.profile, job_id=other,
    )  # fmt: skip
    (view,) = views(Context(cwd=project), [stolen])
    assert view.statuses[0].state is JobState.UNKNOWN
    assert "no longer this run's job" in view.statuses[0].reason
