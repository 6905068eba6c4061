"""Cleaning up: what is not surely over stays, what goes is shown first."""

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


def test_a_preview_deletes_nothing_and_says_the_sizes(root: Root) -> None:
    root.add("old", 40)
    root.add("new", 1)
    before = sorted(root.path.rglob("*"))
    [found] = clean(root.context, older_than=30 * DAY)
    assert [run.name for run in found.runs] == ["old"]
    assert (found.objects, found.trouble) == (1, ())  # its own.py; the others are shared
    assert found.objects_bytes >= 18_000
    assert sorted(root.path.rglob("*")) == before


def test_the_code_goes_and_the_logs_stay(root: Root) -> None:
    old, new = root.add("old", 40), root.add("new", 1)
    for run in (old, new):
        (run / "secrets").write_text("export TOKEN=hush\n")
    expected = clean(root.context, older_than=30 * DAY)
    assert clean(root.context, older_than=30 * DAY, remove=True) == expected
    assert not (old / "code").exists()
    assert (old / "logs" / "batch.log").exists()
    assert not (old / "secrets").exists()
    assert (new / "secrets").exists()
    assert (new / "code" / "shared.py").read_text() == "x" * 20_000
    assert root.objects() == 3
    [again] = clean(root.context, older_than=30 * DAY)
    assert (again.runs, again.objects, again.bytes) == ((), 0, 0)


def train(run: Path) -> list[str]:
    """Write what a job writes in its working directory; return the results, as paths below ``code/``."""
    code = run / "code"
    write(code, {"out/ckpt.pt": "weights" * 5000, "out/log.txt": "step 1\n", "__pycache__/m.pyc": "x"})
    write(code, {"lib/__pycache__/m.cpython-36.pyc.140": "x", "empty/x": ""})
    (code / "empty" / "x").unlink()
    shutil.copy2(code / "shared.py", code / "out" / "config.py")  # the times of the original, and its mode
    (code / "out" / "last.pt").symlink_to("ckpt.pt")
    (code / "train.py").unlink()
    (code / "train.py").write_text("print(2)\n")
    return ["out/ckpt.pt", "out/config.py", "out/last.pt", "out/log.txt", "train.py"]


def below(folder: Path) -> list[str]:
    """Return everything below a folder that is no folder."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in paths)


def test_files_that_the_job_wrote_beside_its_code_stay_and_are_named(root: Root) -> None:
    (root.tree / "data").symlink_to("/nowhere")
    old = root.add("old", 40)
    results = train(old)
    assert (old / "code" / "data").is_symlink()
    [preview] = clean(root.context, older_than=30 * DAY)
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert preview == found
    assert below(old / "code") == results
    assert not (old / "code" / "empty").exists()
    [outputs] = found.outputs
    assert (outputs.folder, outputs.files, list(outputs.names)) == ("old", 5, results)
    assert outputs.bytes >= 35_000
    assert found.trouble == ()
    [again] = clean(root.context, older_than=30 * DAY, remove=True)
    assert (again.runs, again.outputs) == ((), found.outputs)
    assert below(old / "code") == results


def test_files_that_the_job_wrote_go_only_by_an_option_of_their_own(root: Root) -> None:
    old = root.add("old", 40)
    results = train(old)
    clean(root.context, older_than=30 * DAY, remove=True)
    [preview] = clean(root.context, older_than=30 * DAY, outputs=True)
    assert below(old / "code") == results
    [found] = clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert preview == found
    assert list(found.outputs[0].names) == results
    assert found.bytes >= 35_000
    assert not (old / "code").exists()
    assert (old / "logs" / "batch.log").exists()


def test_a_whole_run_whose_job_wrote_beside_its_code_stays(root: Root) -> None:
    """So does the run that it continues; both go with the option."""
    first, free = root.add("first", 90), root.add("free", 90)
    second = root.add("second", 60, parent=str(first))
    train(second)
    before = below(second)
    [found] = clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert below(second) == before
    assert (first.exists(), free.exists()) == (True, False)
    assert [outputs.folder for outputs in found.outputs] == ["second"]
    assert (found.pinned, found.needed) == ((), {"first": "7"})
    [found] = clean(root.context, older_than=30 * DAY, whole=True, outputs=True, remove=True)
    assert [run.name for run in found.runs] == ["first", "second"]
    assert len(found.outputs) == 1
    assert not first.exists()
    assert not second.exists()


def test_pinned_results_beside_the_code_stay_whatever_the_option(root: Root) -> None:
    old = root.add("old", 40)
    results = train(old)
    (old / "pins.json").write_text(json.dumps({"pinned": ["code/out/ckpt.pt"]}))
    for whole in (True, False):
        [found] = clean(root.context, older_than=30 * DAY, whole=whole, outputs=True, remove=True)
        assert (found.pinned, found.outputs) == (("old",), ())
        assert set(results) <= set(below(old / "code"))
    assert below(old / "code") == results


def test_code_goes_also_where_the_file_system_has_no_hard_links(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    old = root.add("old", 40)
    assert (old / "code" / "shared.py").stat().st_nlink == 1
    results = train(old)
    clean(root.context, older_than=30 * DAY, remove=True)
    assert below(old / "code") == results


@pytest.mark.parametrize("content", [None, b"", b"no list", zlib.compress(b"[7]"), zlib.compress(b"{}")])
def test_nothing_of_the_code_goes_if_it_is_not_known_what_was_delivered(
    root: Root, content: bytes | None
) -> None:
    old = root.add("old", 40)
    before = below(old / "code")
    (old / "snapshot.list").unlink()
    if content is not None:
        (old / "snapshot.list").write_bytes(content)
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert below(old / "code") == before
    assert (found.runs, found.outputs[0].files) == ((), len(before))
    clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert not (old / "code").exists()


def test_a_folder_that_the_user_put_in_place_of_the_code_is_left_alone(root: Root, tmp_path: Path) -> None:
    old = root.add("old", 40)
    (old / "code").rename(tmp_path / "moved")
    (old / "code").symlink_to(tmp_path / "moved")
    before = below(tmp_path / "moved")
    clean(root.context, older_than=30 * DAY, outputs=True, remove=True)
    assert below(tmp_path / "moved") == before


def test_of_many_files_some_are_named_and_all_are_counted(root: Root) -> None:
    old = root.add("old", 40)
    write(old / "code" / "out", {f"{number:05}": "" for number in range(reclaim.MOST_NAMES + 5)})
    [found] = clean(root.context, older_than=30 * DAY)
    assert found.outputs[0].files == reclaim.MOST_NAMES + 5
    assert len(found.outputs[0].names) == reclaim.MOST_NAMES


def test_whole_runs_go_if_asked_for(root: Root) -> None:
    old = root.add("old", 40)
    [found] = clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert found.runs[0].bytes >= 8000
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
def test_a_run_that_one_going_on_names_is_never_deleted(
    root: Root, values: dict[str, Any], text: str
) -> None:
    """It writes its checkpoints there, or reads from there."""
    old, free = root.add("old", 400), root.add("free", 400)
    known = json.loads(json.dumps(values).replace("{old}", str(old)))
    root.add("alive", 0, JobState.RUNNING, text.format(old=old), **known)
    [found] = clean(root.context, older_than=DAY, whole=True, remove=True)
    assert (old.exists(), free.exists()) == (True, False)
    assert [run.name for run in found.runs] == ["free"]
    assert found.needed == {"old": "7"}
    assert (old / "code").exists()


def test_a_chain_stays_as_long_as_its_last_run(root: Root) -> None:
    first = root.add("first", 90)
    second = root.add("second", 60, parent=str(first))
    last = root.add("last", 5, parent=str(second))
    [found] = clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert (found.runs, set(found.needed)) == ((), {"first", "second"})
    clean(root.context, older_than=2 * DAY, whole=True, remove=True)
    assert not any(path.exists() for path in (first, second, last))


def test_a_sweep_stays_whole_as_long_as_any_of_its_runs(root: Root) -> None:
    head = root.add("head", 90)
    other = root.add("other", 90, sweep=str(head))
    (head / "members.json").write_text(json.dumps({"runs": [str(head), str(other)]}))
    root.add("resumed", 0, JobState.RUNNING, sweep=str(head))
    clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert (head.exists(), other.exists()) == (True, True)


def test_what_a_run_with_pinned_results_goes_on_from_stays(root: Root) -> None:
    first, free = root.add("first", 90), root.add("free", 90)
    second = root.add("second", 60, parent=str(first))
    (second / "pins.json").write_text(json.dumps({"pinned": ["last.pt"]}))
    [found] = clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert (found.pinned, found.needed) == (("second",), {"first": "7"})
    assert (first.exists(), second.exists(), free.exists()) == (True, True, False)


def test_runs_of_other_clusters_count_where_one_cluster_is_cleaned(root: Root) -> None:
    old = root.add("old", 90)
    alive = root.add("alive", 0, JobState.RUNNING, parent=str(old))
    document = {**json.loads((alive / "job.json").read_text()), "cluster": "other"}
    (alive / "job.json").write_text(json.dumps(document))
    root.context.index.put(RunDir(alive).load())
    clean(root.context, older_than=DAY, whole=True, remove=True, cluster="local")
    assert old.exists()


@pytest.mark.parametrize("state", [JobState.UNKNOWN, JobState.RUNNING, JobState.PENDING])
def test_what_is_not_surely_over_is_never_touched(root: Root, state: JobState) -> None:
    path = root.add("alive", 400, state)
    [found] = clean(root.context, older_than=1, whole=True, remove=True)
    assert found.runs == ()
    assert (path / "code" / "own.py").exists()


def test_a_job_that_ended_just_now_may_come_back(root: Root) -> None:
    root.add("fresh", 100 / DAY)
    [found] = clean(root.context, older_than=1)
    assert found.runs == ()


def started(run: Path, age: float) -> None:
    """Write that a job of the run started so many days ago, in a file of that age."""
    text = json.dumps({"time": int(NOW - age * DAY), "event": "started", "job_id": "7"})
    (run / "events.jsonl").write_text(f'not JSON, but "started"\n{text}\n')
    os.utime(run / "events.jsonl", (NOW - age * DAY, NOW - age * DAY))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["it has started since", "it is requeued just now", "one task of it has"])
def test_a_run_that_was_requeued_behind_our_back_stays(root: Root, whole: bool, how: str) -> None:
    old = root.add("old", 40)
    (old / "secrets").write_text("export TOKEN=hush\n")
    started(old, 41)
    if how == "it has started since":
        started(old, 20)
    elif how == "it is requeued just now":
        os.utime(old / "events.jsonl")
    else:
        (old / "tasks" / "3").mkdir(parents=True)
        started(old / "tasks" / "3", 20)
    before = below(old)
    [found] = clean(root.context, older_than=30 * DAY, whole=whole, remove=True)
    assert found.runs == ()
    assert found.trouble == (f"7: {service._REVIVED}",)
    assert below(old) == before
    (old / "stop").write_text("cancelled by dtslurm\n")
    clean(root.context, older_than=30 * DAY, whole=whole, remove=True)
    assert (old / "stop").read_text() == "cancelled by dtslurm\n"


def test_a_run_whose_code_was_removed_never_starts_again(root: Root) -> None:
    old, bare = root.add("old", 40), root.add("bare", 40)
    shutil.rmtree(bare / "code")
    started(old, 41)
    clean(root.context, older_than=30 * DAY, remove=True)
    assert (old / "stop").read_bytes() == reclaim.CLEANED
    assert not (bare / "stop").exists()  # nothing was removed of it


def test_contents_younger_than_an_hour_stay(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "YOUNG", 3600.0)
    root.add("old", 40)
    clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert root.objects() == 3


def test_what_a_killed_delivery_left_goes_after_a_day(root: Root) -> None:
    root.add("new", 1)
    for name, age in (("a", 2 * DAY), ("b", 60)):
        left = root.path / f".dtslurm-{os.geteuid()}-{name}"
        write(left, {"run/job.json": "{}"})
        os.utime(left, (NOW - age, NOW - age))
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [Path(path).name[-2:] for path in found.unfinished] == ["-a"]
    assert sorted(path.name[-2:] for path in root.path.glob(".dtslurm-*")) == ["-b"]


def test_a_link_or_a_stranger_in_place_of_a_run_is_left_alone(root: Root, tmp_path: Path) -> None:
    old = root.add("old", 40)
    old.rename(tmp_path / "precious")
    old.symlink_to(tmp_path / "precious")
    clean(root.context, older_than=30 * DAY, whole=True, remove=True)
    assert (tmp_path / "precious" / "code" / "own.py").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "../x", "a\0b"])
def test_c25_only_folders_of_the_run_root_are_swept(tmp_path: Path, name: str) -> None:
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


def test_over_a_link_it_does_the_same(root: Root) -> None:
    old = root.add("old", 40)
    far = FarSide()
    cluster = replace(root.context.cluster("local"), transport=far)
    root.context._clusters["local", ""] = cluster
    [found] = clean(root.context, older_than=30 * DAY, remove=True)
    assert [run.name for run in found.runs] == ["old"]
    assert not (old / "code").exists()
    assert len(far.sent) == 2  # what Python there is, and the reclaiming
    with pytest.raises(RequestInvalid):
        service._reclaim(
            root.context, cluster, {"root": "/", "objects": "/x", "runs": [], "whole": False, "remove": False}
        )


def dtslurm(*words: str, code: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtslurm", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_command_line(root: Root) -> None:
    old = root.add("old", 40)
    shown = dtslurm("clean", code=0)
    assert "old" in shown.stdout
    assert "nothing was deleted" in shown.stderr
    assert (old / "code").exists()
    [place] = json.loads(dtslurm("clean", "--json", code=0).stdout)["roots"]
    assert place["runs"][0]["folder"] == "old"
    assert "freed" in dtslurm("clean", "--yes", code=0).stderr
    assert not (old / "code").exists()
    assert "nothing to delete" in dtslurm("clean", code=0).stderr
    assert "--older-than" in dtslurm("clean", "--older-than", "soon", code=2).stderr


def test_the_command_line_names_what_the_job_wrote(root: Root) -> None:
    old = root.add("old", 40)
    train(old)
    for words in (("clean",), ("clean", "--yes"), ("clean", "--runs", "--yes")):
        shown = dtslurm(*words, code=0).stderr
        assert f"{old}/code: kept 5 files, " in shown
        assert "that the job wrote there (--outputs deletes them): out/ckpt.pt, out/config.py" in shown
    assert f"{old}/code: would delete 5 files, " in dtslurm("clean", "--outputs", code=0).stderr
    [place] = json.loads(dtslurm("clean", "--json", code=0).stdout)["roots"]
    assert place["outputs"][0]["names"][0] == "out/ckpt.pt"
    assert f"{old}/code: deleted 5 files, " in dtslurm("clean", "--outputs", "--yes", code=0).stderr
    assert not (old / "code").exists()


def test_the_age_that_was_used_is_said(root: Root) -> None:
    root.add("fresh", (NOW - time.time() + 100) / DAY)  # by the clock of the program
    said = dtslurm("clean", "--older-than", "2s", code=0).stderr
    assert "--older-than 2s: 5m00s is used, because a job can be requeued for this time after its end" in said
    assert "runs that ended more than 5m00s ago have nothing to delete" in said
