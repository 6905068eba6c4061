"""The effects of a job on later runs, and the files that it leaves."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import MODULES, Delivery, deliver
from dtslurm.store.wire_format import objects_folder, request
from dtslurm.transport.base import Transport
from dtslurm.worker.delivery import objects as stored
from dtslurm.worker.delivery import prebuilt_tree
from dtslurm.worker.delivery.install_run import place
from dtslurm.worker.delivery.objects import Objects, choose_objects_folder
from dtslurm.worker.supervisor import secrets
from tests.render.conftest import Render, render_job
from tests.store.trees import HERE, PYTHON, FarSide, repository, snap

__all__ = ["render_job"]  # a fixture

RIGHT, WRONG = "print('right')\n", "print('wrong')\n"


@pytest.fixture(params=["here", "far"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return HERE if request.param == "here" else FarSide()


class Project:
    """A project of two scripts with one content, and its runs."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.count = folder / "runs", 0
        self.here = repository(folder / "project", {"train.py": RIGHT, "again.py": RIGHT, "other.py": "1\n"})

    def parcel(self) -> Delivery:
        self.count += 1
        snapshot, files = snap(self.here), {"job.json": b"{}"}
        return Delivery(f"{self.runs}/{self.count}", objects_folder(str(self.runs)), files, snapshot)

    def run(self, transport: Transport) -> Path:
        """Bring a run there; return its code."""
        parcel = self.parcel()
        deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))
        return Path(parcel.run_dir) / "code"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    left = {path.name for path in made.runs.iterdir()}
    assert all(name.isdecimal() or name.startswith(".objects") for name in left)


def rewrite_script(script: Path) -> None:
    """Write other code of the same length over a script, as its job could, and set the time back."""
    before = script.stat()
    script.chmod(0o600)
    script.write_text(WRONG)
    script.chmod(before.st_mode)
    os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (script.stat().st_size, script.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_next_run_does_not_use_a_script_rewritten_by_an_earlier_job(
    project: Project, transport: Transport
) -> None:
    first = project.run(transport)
    rewrite_script(first / "train.py")
    second = project.run(transport)
    assert [(second / name).read_text() for name in ("train.py", "again.py")] == [RIGHT, RIGHT]
    assert (first / "train.py").read_text() == WRONG  # that job's own from now on
    rewrite_script(second / "again.py")
    assert (project.run(transport) / "train.py").read_text() == RIGHT


def test_prebuilt_tree_with_a_script_rewritten_by_an_earlier_job_is_not_used(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt_tree, "LEAST", 1)
    first = project.run(FarSide())
    asked = request(project.parcel(), (), 1.0, {})
    prebuilt_tree.make_spare(asked)
    rewrite_script(first / "train.py")
    objects, used = Objects(stored.choose_objects_folder(os.fsencode(asked["objects"]))), []

    def made(staging: bytes, code: bytes) -> bool:
        used.append(prebuilt_tree.take_spare(asked, objects, staging, code))
        return used[-1]

    with pytest.raises(Exception, match="missing"):  # it is sent once more
        place(asked, objects, made)
    assert (project.run(FarSide()) / "train.py").read_text() == RIGHT


def test_unchanged_objects_are_not_read_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.run(HERE)
    files = snap(project.here).files

    open_descriptor = os.open

    def open_no_object(path: str | bytes, flags: int) -> int:
        assert Path(os.fsdecode(path)).name == "seals", "an object is read"
        return open_descriptor(path, flags)

    monkeypatch.setattr(os, "open", open_no_object)
    objects = Objects(os.fsencode(objects_folder(str(project.runs))))
    for file in files:
        assert objects.has(file.key, file.size)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "b"}', "null", "\xff"])
def test_unreadable_seals_do_not_prevent_a_run(project: Project, text: str) -> None:
    project.run(HERE)
    seals = project.runs / ".objects" / "seals"
    seals.chmod(0o600)
    seals.write_text(text, "latin-1")
    assert (project.run(HERE) / "train.py").read_text() == RIGHT


def test_seal_file_does_not_grow_without_limit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_SEALS", 2)
    for number in range(4):
        (project.here / "other.py").write_text(f"{number}\n")
        project.run(HERE)
    assert (project.runs / ".objects" / "seals").read_text().count(":") <= 2 + 1


# ---- a run root that several users share


def test_second_user_of_a_run_root_gets_a_separate_object_store(
    project: Project, transport: Transport
) -> None:
    theirs = project.runs / ".objects"
    theirs.mkdir(parents=True, mode=0o700)
    mine = Path(f"{theirs}-{os.geteuid()}")
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    else:  # only root makes files of another user: this one is there already
        mine.mkdir(mode=0o700)
    assert (project.run(transport) / "train.py").read_text() == RIGHT
    assert list(theirs.iterdir()) == []
    assert (mine / "seals").exists()
    assert choose_objects_folder(os.fsencode(theirs)) == os.fsencode(mine)
    theirs.rmdir()
    assert choose_objects_folder(os.fsencode(theirs)) == os.fsencode(mine)  # what is there is not sent again


# ---- secrets after the end


def lines_reading_secrets(script: str) -> str:
    """Return the lines of a script that read the secrets."""
    [lines] = re.findall(
        r"((?:^# The supervisor deletes.*\n^\[ -e .*\n)?^\. \S*secrets .*\n(?:^(?:#|mkdir|\[|rm) .*\n)*)",
        script,
        re.MULTILINE,
    )
    return str(lines)


def start(lines: str, run: Path, task: str = "") -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "DTSLURM_RUN_DIR": str(run)}
    if task:
        env |= {
            "SLURM_ARRAY_TASK_ID": task,
            "SLURM_ARRAY_TASK_COUNT": "2",
            "DTSLURM_RUN_DIR": f"{run}/tasks/{task}",
        }
    text = lines.replace("/scratch/me/runs/train-1", str(run)) + 'echo "has ${TOKEN:-nothing}"'
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "secrets").write_text("export TOKEN=abc\n")
    return folder


def test_single_start_job_deletes_its_secrets_after_reading(render_job: Render, run: Path) -> None:
    lines = lines_reading_secrets(
        render_job("h100x8-ib", "torchrun", secrets=("TOKEN",), requeue=False).script
    )
    assert start(lines, run).stdout == "has abc\n"
    assert not (run / "secrets").exists()


def test_last_task_of_an_array_deletes_the_secrets(render_job: Render, run: Path) -> None:
    job = render_job("h100x8-ib", "torchrun", secrets=("TOKEN",), requeue=False, array="0-1")
    lines = lines_reading_secrets(job.script)
    assert start(lines, run, "0").stdout == "has abc\n"
    assert start(lines, run, "0").stdout == "has abc\n"
    assert (run / "secrets").exists()
    assert start(lines, run, "1").stdout == "has abc\n"
    assert not (run / "secrets").exists()


def test_requeueable_job_keeps_its_secrets(render_job: Render, run: Path) -> None:
    lines = lines_reading_secrets(
        render_job("h100x8-ib", "torchrun", secrets=("TOKEN",), requeue=True).script
    )
    assert start(lines, run).stdout == "has abc\n"
    assert start(lines, run).stdout == "has abc\n"


def test_late_copy_of_a_finished_run_starts_without_secrets(render_job: Render, run: Path) -> None:
    job = render_job("h100x8-ib", "torchrun", secrets=("TOKEN",), max_restarts=3)
    lines = lines_reading_secrets(job.script)
    assert start(lines, run).stdout == "has abc\n"
    secrets.delete_after_end(str(run), {})
    assert not (run / "secrets").exists()
    assert start(lines, run).returncode != 0  # it must not train without
    (run / "done").write_text("")
    assert start(lines, run).stdout == "has nothing\n"


def test_supervisor_of_the_last_task_deletes_the_secrets(run: Path) -> None:
    env = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2"}
    secrets.delete_after_end(f"{run}/tasks/0", env)
    secrets.delete_after_end(f"{run}/tasks/0", env)
    assert (run / "secrets").exists()
    secrets.delete_after_end(f"{run}/tasks/1/", {**env, "SLURM_ARRAY_TASK_ID": "1"})
    assert not (run / "secrets").exists()
    secrets.delete_after_end(f"{run}/tasks/1", {**env, "SLURM_ARRAY_TASK_ID": "1"})  # and says nothing of it


def test_job_without_secrets_reads_none(render_job: Render) -> None:
    job = render_job("h100x8-ib", "torchrun")
    assert "secrets" not in job.script
    assert replace(job.spec, secrets=()) == job.spec


@pytest.mark.parametrize("planted", ["nothing", "one", "both"])
def test_images_of_another_user_are_not_used(render_job: Render, tmp_path: Path, planted: str) -> None:
    script = render_job(
        "h100x8-ib", "srun", nodes=2, container="nvcr.io/nvidia/pytorch:25.01-py3", runtime="pyxis"
    ).script
    [lines] = re.findall(r"^images=.*?^}$", script, re.MULTILINE | re.DOTALL)
    folder = tmp_path / ".images"
    own = Path(f"{folder}-{os.geteuid()}")
    theirs = {"nothing": [], "one": [folder], "both": [folder, own]}[planted]
    for path in theirs:
        path.mkdir()
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
    text = re.sub("^images=.*$", f"images={folder}", lines, count=1, flags=re.MULTILINE) + '\necho "$images"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    if os.geteuid() != 0:  # only root makes folders of another user
        assert done.stdout == f"{folder}\n"
    elif planted == "both":
        assert (done.returncode, done.stdout) == (1, "")
        assert "belongs to another user" in done.stderr
    else:
        assert done.stdout == f"{folder if planted == 'nothing' else own}\n"
