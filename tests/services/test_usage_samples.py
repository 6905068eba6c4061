"""The runs of the user among accounted jobs, their samples, and fetched files."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import CommandNotFound, JobNotFound, ProfileNotFound, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.usage import GpuTime, JobUse
from dtslurm.services.observe import usage as service
from dtslurm.services.results import fetch as fetching
from dtslurm.services.wiring import login_node
from dtslurm.services.wiring.context import Context
from dtslurm.store.pull import Copied
from dtslurm.worker.lib import answer


def run_record(job: str, **values: Any) -> JobRecord:
    known = {
        "token": job * 3, "cluster": "hpc", "name": "llama", "run_dir": f"/r/{job}", "phase": "submitted",
        "created_at": 0.0, "job_id": job, **values,
    }  # fmt: skip
    return JobRecord(**known)


def job_use(job: str, **values: Any) -> JobUse:
    return JobUse(**{"job_id": job, "name": "llama", "gpus": 8, **values})


def test_samples_are_read_only_for_own_runs_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(_: object, program: str, request: Any, timeout: float) -> Any:
        del timeout
        asked.append((program, request["runs"]))
        return {"runs": [[10, 500.0, 4, 10, 3000.0], [0, 0.0, 0, 0, 0.0], [4, 400.0, 0, 0, 0.0]]}

    monkeypatch.setattr(service, "query_worker", ask)
    mine = [
        run_record("1"),
        run_record("2"),
        run_record("3"),
        run_record("4"),
        run_record("5"),
        run_record("6", job_id=None),
    ]
    uses = [
        job_use("1", comment=mine[0].comment), job_use("2_7"), job_use("3"), job_use("4", gpus=0),
        job_use("5", comment="another's"), job_use("9"),
    ]  # fmt: skip
    assert service._samples(Context(), mine, uses) == {
        "1": GpuTime(used=0.5, idle=0.4, power_w=300.0), "3": GpuTime(used=1.0, idle=0.0, power_w=None),
    }  # fmt: skip
    assert asked == [("telemetry.gpu_time", ["/r/1", "/r/2", "/r/3"])]


def test_no_samples_are_read_if_no_job_is_an_own_run() -> None:
    assert service._samples(Context(), [run_record("1", name="other")], [job_use("1")]) == {}


def test_usage_skips_a_cluster_whose_profile_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(_: Context, one: JobRecord) -> Any:
        if one.cluster == "gone":
            raise ProfileNotFound(one.cluster)
        return one.cluster

    monkeypatch.setattr(Context, "cluster_of", of)
    monkeypatch.setattr(Context, "cluster", lambda _, name: name)
    monkeypatch.setattr(Context, "default_cluster", lambda _: ("local", "no Slurm"))
    runs = [
        run_record("1"),
        run_record("2", cluster="gone"),
        run_record("3"),
        run_record("4", cluster="other"),
    ]
    result: list[object] = [*service._clusters(Context(), runs, None)]
    assert result == ["hpc", "other", "local"]
    result = [*service._clusters(Context(), runs, "named")]
    assert result == ["named", "hpc", "other"]


# ---- What a fetch makes of the far side's answers ----


def fetch_with_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: Copied) -> fetching.Fetched:
    waiting = iter(answers)
    monkeypatch.setattr(fetching, "_copy", lambda *_: next(waiting))
    return fetching.fetch(Context(), run_record("1"), ["logs"], tmp_path)


def test_a_file_that_changed_during_the_copy_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torn = tmp_path / "rank-0.log"
    torn.write_text("half")
    first = Copied(files=[torn], mismatched=[torn], source_files=1, bytes=4)
    result = fetch_with_answers(monkeypatch, tmp_path, first, Copied(files=[torn], source_files=1, bytes=9))
    assert (result.files, result.bytes, torn.exists()) == ((torn,), 13, False)


def test_a_file_that_differs_after_two_copies_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("x")
    wrong = Copied(mismatched=[tmp_path / "a"], source_files=1)
    with pytest.raises(StoreError, match="the downloaded copy differs from the file on the cluster"):
        fetch_with_answers(monkeypatch, tmp_path, wrong, wrong)


def test_fetch_reports_a_deleted_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(JobNotFound, match="the run directory /r/1 no longer exists: no such file"):
        fetch_with_answers(monkeypatch, tmp_path, Copied(unreadable={"/r/1": "no such file"}))
    with pytest.raises(StoreError) as caught:
        fetch_with_answers(
            monkeypatch, tmp_path, Copied(unreadable={"/r/1/logs/x": "permission denied"}, source_files=1)
        )
    assert caught.value.evidence == ("/r/1/logs/x: permission denied",)


def test_fetch_from_a_login_node_without_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    far = SimpleNamespace(remote=True, transport=SimpleNamespace(host="login1"))
    monkeypatch.setattr(Context, "cluster_of", lambda *_: far)
    monkeypatch.setattr(login_node, "query_login_node", lambda *_: SimpleNamespace(python=""))
    with pytest.raises(CommandNotFound, match=r"has no Python 3\.6"):
        fetching.fetch(Context(), run_record("1"), [], tmp_path)


def test_answer_is_a_compressed_line_after_the_mark(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"runs": [[10, 500.0]], "name": "é" * 1000}
    print("motd", end="")
    answer.tell("MARK:", values)
    before, line, after = capsys.readouterr().out.split("\n")
    assert (before, line[:5], after) == ("motd", "MARK:", "")
    assert json.loads(zlib.decompress(base64.b64decode(line[5:]))) == values
    assert len(line) < 200
