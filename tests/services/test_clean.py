"""``clean``: previews, deleted files, and runs that are kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs import clean as service
from dtslurm.services.runs.clean import clean
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.store.delivery import Delivery, deliver
from dtslurm.store.rundir import RunDir
from dtslurm.store.wire_format import objects_folder
from dtslurm.worker.delivery import reclaim
from dtslurm.worker.lib.disk import WorkerError
from tests.store.trees import HERE, FarSide, snap, write

NOW = time.time()
DAY = 86400


class Root:
    """A run root with runs made as submitting does."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "runs"
        self.tree = tmp_path / "tree"
        self.context = Context(cwd=tmp_path, clock=lambda: NOW)
        write(self.tree, {"train.py": "print(1)\n", "shared.py": "x" * 20_000})

    def add(
        self, name: str, days: float, state: JobState = JobState.COMPLETED, text: str = "", **values: Any
    ) -> Path:
        """Add a run that ended so many days ago, with a file of its own in its code; ``text``: its trials."""
        write(self.tree, {"own.py": f"# {name}\n" * 3000})
        path = self.path / name
        status = JobStatus(job_id="7", state=state, end_time=int(NOW - days * DAY) if state.ended else None)
        record = JobRecord(
            token=name,
            cluster="local",
            name=name,
            run_dir=str(path),
            phase="submitted",
            created_at=NOW,
            job_id="7",
            **{key: value for key, value in values.items() if key != "request"},
        )
        final = (status,) if state.ended else ()
        document = {"schema": 1, **codec.plain(replace(record, final=final)), **values}
        files = {"job.json": codec.encode(document), "logs/batch.log": b"log\n" * 2000}
        if text:
            files["trials.jsonl"] = text.encode()
        deliver(HERE, Delivery(str(path), objects_folder(str(self.path)), files, snap(self.tree)))
        self.context.index.put(record)
        return path

    def objects(self) -> int:
        return sum(path.is_file() for path in Path(objects_folder(str(self.path))).rglob("*/*"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Root]:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    monkeypatch.setattr(reclaim, "YOUNG", -1.0)
    return Root(tmp_path)  # type: ignore[return-value]


def test_a_preview_of_clean_deletes_nothing_and_reports_sizes(root: Root) -> None:
    root.add("old", 40)
    root.add("new", 1)
    before = sorted(root.path.rglob("*"))
    [result] = clean(root.context, older_than=30 * DAY)
    assert [run.name for run in result.runs] == ["old"]
    assert (result.objects, result.trouble) == (1, ())  # its own.py; the others are shared
    assert result.objects_bytes >= 18_000
    assert sorted(root.path.rglob("*")) == before


def test_clean_deletes_code_and_secrets_and_keeps_logs(root: Root) -> None:
    old, new = root.add("old", 40), root.add("new", 1)
    for run in (old, new):
        (run / "secrets").write_text("export TOKEN=hush\n")
        (run / "notify.json").write_text("{}")
    expected = clean(root.context, older_than=30 * DAY)
    assert clean(root.context, older_than=30 * DAY, remove=True) == expected
    assert not (old / "code").exists()
    assert (old / "logs" / "batch.log").exists()
    assert not (old / "secrets").exists()
    assert not (old / "notify.json").exists()
    assert (new / "secrets").exists()
    assert (new / "code" / "shared.py").read_text() == "x" * 20_000
    assert root.objects() == 3
    [again] = clean(root.context, older_than=30 * DAY)
    assert (again.runs, again.objects, again.bytes) == ((), 0, 0)


def write_job_outputs(run: Path) -> list[str]:
    """Write the outputs of a job into ``code/``; return their paths below ``code/``."""
    code = run / "code"
    write(code, {"out/ckpt.pt": "weights" * 5000, "out/log.txt": "step 1\n", "__pycache__/m.pyc": "x"})
    write(code, {"lib/__pycache__/m.cpython-36.pyc.140": "x", "empty/x": ""})
    (code / "empty" / "x").unlink()
    shutil.copy2(code / "shared.py", code / "out" / "config.py")  # the times of the original, and its mode
    (code / "out" / "last.pt").symlink_to("ckpt.pt")
    (code / "train.py").unlink()
    (code / "train.py").write_text("print(2)\n")
    return ["out/ckpt.pt", "out/config.py", "out/last.pt", "out/log.txt", "train.py"]


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files and links below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in paths)


def test_clean_keeps_and_lists_files_that_the_job_wrote_in_the_code_folder(root: Root) -> None:
    (root.tree / "data").symlink_to("/nowhere")
    old = root.add("old", 40)
    results = write_job_outputs(old)
    assert (old / "code" / "data").is_symlink()
    [preview] = clean(root.context, older_than=30 * DAY)
    [result] = clean(root.context, older_than=30 * DAY, remove=True)
    assert preview == result
    assert list_files(old / "code") == results
    assert not (old / "code" / "empty").exists()
    [outputs] = result.outputs
    assert (outputs.folder, outputs.files, list(outputs.names)) == ("old", 5, results)
    assert outputs.bytes >= 35_000
    assert result.trouble == ()
    [again] = clean(root.context, older_than=30 * DAY, remove=True)
    assert (again.runs, again.outputs) == ((), result.outputs)
    assert list_files(old / "code") == results


def test_clean_deletes_job_outputs_only_with_the_outputs_option(root: Root) -> None:
    old = root.add("old", 40)
    results = write_job_outputs(old)
    clean(root.context, older_than=30 * DAY, remove=True)
    [preview] = clean(root.context, older_than=30 * DAY, outputs=True)
    assert list_files(old / "code") == results
    [result] = clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert preview == result
    assert list(result.outputs[0].names) == results
    assert result.bytes >= 35_000
    assert not (old / "code").exists()
    assert (old / "logs" / "batch.log").exists()


def test_clean_keeps_a_whole_run_whose_job_wrote_in_the_code_folder(root: Root) -> None:
    """The parent of the run is kept too; with the option, both are deleted."""
    first, free = root.add("first", 90), root.add("free", 90)
    second = root.add("second", 60, parent=str(first))
    write_job_outputs(second)
    before = list_files(second)
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert list_files(second) == before
    assert (first.exists(), free.exists()) == (True, False)
    assert [outputs.folder for outputs in result.outputs] == ["second"]
    assert (result.pinned, result.needed) == ((), {"first": "7"})
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=True, outputs=True, remove=True)
    assert [run.name for run in result.runs] == ["first", "second"]
    assert len(result.outputs) == 1
    assert not first.exists()
    assert not second.exists()


def test_clean_never_deletes_pinned_results_in_the_code_folder(root: Root) -> None:
    old = root.add("old", 40)
    results = write_job_outputs(old)
    (old / "pins.json").write_text(json.dumps({"pinned": ["code/out/ckpt.pt"]}))
    for whole in (True, False):
        [result] = clean(root.context, older_than=30 * DAY, whole_runs=whole, outputs=True, remove=True)
        assert (result.pinned, result.outputs) == (("old",), ())
        assert set(results) <= set(list_files(old / "code"))
    assert list_files(old / "code") == results


def test_clean_deletes_code_on_a_file_system_without_hard_links(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    old = root.add("old", 40)
    assert (old / "code" / "shared.py").stat().st_nlink == 1
    results = write_job_outputs(old)
    clean(root.context, older_than=30 * DAY, remove=True)
    assert list_files(old / "code") == results


@pytest.mark.parametrize("content", [None, b"", b"no list", zlib.compress(b"[7]"), zlib.compress(b"{}")])
def test_clean_keeps_the_code_if_the_list_of_delivered_files_is_unreadable(
    root: Root, content: bytes | None
) -> None:
    old = root.add("old", 40)
    before = list_files(old / "code")
    (old / "snapshot.list").unlink()
    if content is not None:
        (old / "snapshot.list").write_bytes(content)
    [result] = clean(root.context, older_than=30 * DAY, remove=True)
    assert list_files(old / "code") == before
    assert (result.runs, result.outputs[0].files) == ((), len(before))
    clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert not (old / "code").exists()


def test_clean_does_not_follow_a_link_in_place_of_the_code_folder(root: Root, tmp_path: Path) -> None:
    old = root.add("old", 40)
    (old / "code").rename(tmp_path / "moved")
    (old / "code").symlink_to(tmp_path / "moved")
    before = list_files(tmp_path / "moved")
    clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert list_files(tmp_path / "moved") == before


def test_clean_lists_a_limited_number_of_outputs_and_counts_all(root: Root) -> None:
    old = root.add("old", 40)
    write(old / "code" / "out", {f"{number:05}": "" for number in range(reclaim.MOST_NAMES + 5)})
    [result] = clean(root.context, older_than=30 * DAY)
    assert result.outputs[0].files == reclaim.MOST_NAMES + 5
    assert len(result.outputs[0].names) == reclaim.MOST_NAMES


def test_clean_deletes_whole_runs_on_request(root: Root) -> None:
    old = root.add("old", 40)
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert result.runs[0].bytes >= 8000
    assert not old.exists()
    assert root.objects() == 0
    assert clean(root.context, older_than=30 * DAY) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"parent": "{old}"}, ""),
        ({"sweep": "{old}"}, ""),
        ({"stages": {"prepare": "old"}}, ""),
        ({"request": {"env": ["DTSLURM_CHECKPOINT_DIR={old}/checkpoints"]}}, ""),
        ({}, '{{"number": 3, "checkpoints": "{old}/tasks/3/checkpoints"}}\n'),
    ],
)
def test_clean_keeps_a_run_that_an_active_run_refers_to(
    root: Root, values: dict[str, Any], text: str
) -> None:
    """The active run writes its checkpoints there, or reads from there."""
    old, free = root.add("old", 400), root.add("free", 400)
    document = json.loads(json.dumps(values).replace("{old}", str(old)))
    root.add("alive", 0, JobState.RUNNING, text.format(old=old), **document)
    [result] = clean(root.context, older_than=DAY, whole_runs=True, remove=True)
    assert (old.exists(), free.exists()) == (True, False)
    assert [run.name for run in result.runs] == ["free"]
    assert result.needed == {"old": "7"}
    assert (old / "code").exists()


def test_clean_keeps_all_runs_of_a_chain_until_the_last_is_old(root: Root) -> None:
    first = root.add("first", 90)
    second = root.add("second", 60, parent=str(first))
    last = root.add("last", 5, parent=str(second))
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert (result.runs, set(result.needed)) == ((), {"first", "second"})
    clean(root.context, older_than=2 * DAY, whole_runs=True, remove=True)
    assert not any(path.exists() for path in (first, second, last))


def test_clean_keeps_a_sweep_while_any_of_its_runs_is_active(root: Root) -> None:
    head = root.add("head", 90)
    other = root.add("other", 90, sweep=str(head))
    (head / "members.json").write_text(json.dumps({"runs": [str(head), str(other)]}))
    root.add("resumed", 0, JobState.RUNNING, sweep=str(head))
    clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert (head.exists(), other.exists()) == (True, True)


def test_clean_keeps_the_parent_of_a_run_with_pinned_results(root: Root) -> None:
    first, free = root.add("first", 90), root.add("free", 90)
    second = root.add("second", 60, parent=str(first))
    (second / "pins.json").write_text(json.dumps({"pinned": ["last.pt"]}))
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert (result.pinned, result.needed) == (("second",), {"first": "7"})
    assert (first.exists(), second.exists(), free.exists()) == (True, True, False)


def test_clean_of_one_cluster_respects_references_from_other_clusters(root: Root) -> None:
    old = root.add("old", 90)
    alive = root.add("alive", 0, JobState.RUNNING, parent=str(old))
    document = {**json.loads((alive / "job.json").read_text()), "cluster": "other"}
    (alive / "job.json").write_text(json.dumps(document))
    root.context.index.put(RunDir(alive).load())
    clean(root.context, older_than=DAY, whole_runs=True, remove=True, cluster="local")
    assert old.exists()


@pytest.mark.parametrize("state", [JobState.UNKNOWN, JobState.RUNNING, JobState.PENDING])
def test_clean_keeps_runs_that_are_unknown_running_or_pending(root: Root, state: JobState) -> None:
    path = root.add("alive", 400, state)
    [result] = clean(root.context, older_than=1, whole_runs=True, remove=True)
    assert result.runs == ()
    assert (path / "code" / "own.py").exists()


def test_clean_keeps_a_job_that_ended_recently(root: Root) -> None:
    root.add("fresh", 100 / DAY)
    [result] = clean(root.context, older_than=1)
    assert result.runs == ()


def write_start_event(run: Path, age: float) -> None:
    """Write a start event of ``age`` days ago, in a file of that age."""
    text = json.dumps({"time": int(NOW - age * DAY), "event": "started", "job_id": "7"})
    (run / "events.jsonl").write_text(f'not JSON, but "started"\n{text}\n')
    os.utime(run / "events.jsonl", (NOW - age * DAY, NOW - age * DAY))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["it has started since", "it is requeued just now", "one task of it has"])
def test_clean_keeps_a_run_that_was_requeued_outside_dtslurm(root: Root, whole: bool, how: str) -> None:
    old = root.add("old", 40)
    (old / "secrets").write_text("export TOKEN=hush\n")
    write_start_event(old, 41)
    if how == "it has started since":
        write_start_event(old, 20)
    elif how == "it is requeued just now":
        os.utime(old / "events.jsonl")
    else:
        (old / "tasks" / "3").mkdir(parents=True)
        write_start_event(old / "tasks" / "3", 20)
    before = list_files(old)
    [result] = clean(root.context, older_than=30 * DAY, whole_runs=whole, remove=True)
    assert result.runs == ()
    assert result.trouble == (f"7: {service._REVIVED}",)
    assert list_files(old) == before
    (old / "stop").write_text("cancelled by dtslurm\n")
    clean(root.context, older_than=30 * DAY, whole_runs=whole, remove=True)
    assert (old / "stop").read_text() == "cancelled by dtslurm\n"


def test_clean_prevents_a_cleaned_run_from_starting_again(root: Root) -> None:
    old, bare = root.add("old", 40), root.add("bare", 40)
    shutil.rmtree(bare / "code")
    write_start_event(old, 41)
    clean(root.context, older_than=30 * DAY, remove=True)
    assert (old / "stop").read_bytes() == reclaim.CLEANED
    assert not (bare / "stop").exists()  # nothing was removed of it


def test_clean_keeps_stored_files_younger_than_an_hour(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "YOUNG", 3600.0)
    root.add("old", 40)
    clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert root.objects() == 3


def test_clean_deletes_an_unfinished_delivery_after_a_day(root: Root) -> None:
    root.add("new", 1)
    for name, age in (("a", 2 * DAY), ("b", 60)):
        left = root.path / f".dtslurm-{os.geteuid()}-{name}"
        write(left, {"run/job.json": "{}"})
        os.utime(left, (NOW - age, NOW - age))
    [result] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [Path(path).name[-2:] for path in result.unfinished] == ["-a"]
    assert sorted(path.name[-2:] for path in root.path.glob(".dtslurm-*")) == ["-b"]


def test_clean_does_not_follow_a_link_in_place_of_a_run_directory(root: Root, tmp_path: Path) -> None:
    old = root.add("old", 40)
    old.rename(tmp_path / "precious")
    old.symlink_to(tmp_path / "precious")
    clean(root.context, older_than=30 * DAY, whole_runs=True, remove=True)
    assert (tmp_path / "precious" / "code" / "own.py").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "../x", "a\0b"])
def test_c25_clean_refuses_folders_outside_the_run_root(tmp_path: Path, name: str) -> None:
    asked = {
        "root": str(tmp_path),
        "objects": str(tmp_path / "o"),
        "runs": [name],
        "whole": True,
        "remove": True,
    }
    with pytest.raises(WorkerError):
        reclaim.reclaim(asked)
    with pytest.raises(WorkerError):
        reclaim.reclaim({**asked, "runs": [], "root": f"{tmp_path}/../x"})


def test_clean_works_over_a_remote_transport(root: Root) -> None:
    old = root.add("old", 40)
    far = FarSide()
    cluster = replace(root.context.cluster("local"), transport=far)
    root.context._clusters["local", ""] = cluster
    [result] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [run.name for run in result.runs] == ["old"]
    assert not (old / "code").exists()
    assert len(far.sent) == 2  # what Python there is, and the reclaiming
    with pytest.raises(RequestInvalid):
        service._reclaim(
            root.context, cluster, {"root": "/", "objects": "/x", "runs": [], "whole": False, "remove": False}
        )


def run_dtslurm(*words: str, code: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtslurm", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_clean_command_previews_and_deletes(root: Root) -> None:
    old = root.add("old", 40)
    shown = run_dtslurm("clean", code=0)
    assert "old" in shown.stdout
    assert "nothing was deleted" in shown.stderr
    assert (old / "code").exists()
    [place] = json.loads(run_dtslurm("clean", "--json", code=0).stdout)["roots"]
    assert place["runs"][0]["folder"] == "old"
    assert "freed" in run_dtslurm("clean", "--yes", code=0).stderr
    assert not (old / "code").exists()
    assert "nothing to delete" in run_dtslurm("clean", code=0).stderr
    assert "--older-than" in run_dtslurm("clean", "--older-than", "soon", code=2).stderr


def test_the_clean_command_lists_job_outputs(root: Root) -> None:
    old = root.add("old", 40)
    write_job_outputs(old)
    for words in (("clean",), ("clean", "--yes"), ("clean", "--runs", "--yes")):
        shown = run_dtslurm(*words, code=0).stderr
        assert f"{old}/code: kept 5 files, " in shown
        assert "that the job wrote there (--outputs deletes them): out/ckpt.pt, out/config.py" in shown
    assert f"{old}/code: would delete 5 files, " in run_dtslurm("clean", "--outputs", code=0).stderr
    [place] = json.loads(run_dtslurm("clean", "--json", code=0).stdout)["roots"]
    assert place["outputs"][0]["names"][0] == "out/ckpt.pt"
    assert f"{old}/code: deleted 5 files, " in run_dtslurm("clean", "--outputs", "--yes", code=0).stderr
    assert not (old / "code").exists()


def test_the_clean_command_reports_the_age_that_applies(root: Root) -> None:
    root.add("fresh", (NOW - time.time() + 100) / DAY)  # by the clock of the program
    stderr = run_dtslurm("clean", "--older-than", "2s", code=0).stderr
    assert (
        "--older-than 2s: 5m00s is used, because a job can be requeued for this time after its end" in stderr
    )
    assert "runs that ended more than 5m00s ago have nothing to delete" in stderr
