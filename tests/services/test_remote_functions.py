"""Functions on a remote cluster: interpreters, results and logs."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import JobNotFound, RequestInvalid, TransportError
from dtslurm.model.cluster import ClusterProfile, EnvironmentSetup
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit import functions
from dtslurm.services.submit.functions import _MUST_MATCH, fetch_result, log_of
from dtslurm.services.wiring.context import Context
from dtslurm.transport.base import Completed


def fake_cluster(
    answer: str = "", stderr: str = "", *, remote: bool = True, python: str | None = None
) -> Any:
    """Return a cluster whose Python prints this answer."""
    asked: list[str] = []

    def run(argv: list[str], timeout: float) -> Completed:
        del timeout
        asked.append(argv[0])
        return Completed(tuple(argv), 0, answer, stderr)

    profile = ClusterProfile(name="hpc", environment=EnvironmentSetup(python=python))
    transport = SimpleNamespace(run=run, host="login1", asked=asked)
    return SimpleNamespace(profile=profile, remote=remote, transport=transport)


def python_versions(**values: str) -> str:
    known = {"python": platform.python_version(), **{name: metadata.version(name) for name in _MUST_MATCH}}
    return "Welcome!\n" + json.dumps({**known, **values}) + "\n"


def function_python(where: Any, **asked: Any) -> str:
    return functions._python(Context(), where, JobRequest(script="f.py", **asked))


def test_the_interpreter_of_a_function_follows_option_profile_and_container() -> None:
    assert function_python(fake_cluster(remote=False)) == sys.executable
    assert function_python(fake_cluster(remote=False), python="/other/python") == "/other/python"
    assert function_python(fake_cluster(), container="image.sif") == "python"
    far = fake_cluster(python_versions(), python="/site/python")
    assert function_python(far) == "/site/python"
    assert function_python(far, python="/mine/python") == "/mine/python"
    assert far.transport.asked == ["/site/python", "/mine/python"]
    assert function_python(fake_cluster(python_versions())) == "python3"


def test_an_interpreter_with_incompatible_versions_is_refused() -> None:
    [name, *_] = _MUST_MATCH
    for values, result in (
        ({"python": "2.7.18"}, "and 2.7.18 on login1; pickled functions need the same version"),
        ({name: ""}, f"login1 has no {name}; run pip install {name}=="),
        ({name: "999.1"}, f"{name} is {metadata.version(name)} on this machine and 999.1 on login1"),
    ):
        with pytest.raises(RequestInvalid) as caught:
            function_python(fake_cluster(python_versions(**values)))
        [problem] = caught.value.problems
        assert result in problem
        assert "the interpreter on the cluster is python3" in caught.value.hint


@pytest.mark.parametrize("answer", ["", "not json\n"])
def test_an_interpreter_that_does_not_start_is_refused(answer: str) -> None:
    with pytest.raises(RequestInvalid, match="python3 on login1 does not run: no such file"):
        function_python(fake_cluster(answer, "no such file\n"))


@pytest.mark.parametrize(
    ("count", "most", "array"), [(1, 0, None), (1, 5, None), (4, 0, "0-3"), (4, 2, "0-3%2"), (4, 4, "0-3")]
)
def test_several_functions_become_a_job_array(count: int, most: int, array: str | None) -> None:
    assert functions._array(count, most) == array


def run_record(folder: Path, **values: Any) -> JobRecord:
    return JobRecord(
        token="t", cluster="hpc", name="f", run_dir=str(folder), phase="submitted", created_at=0.0,
        job_id="17", **values,
    )  # fmt: skip


@pytest.mark.parametrize("error", [JobNotFound("not yet"), TransportError("no link")])
def test_fetch_result_returns_false_if_the_result_is_not_available(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fetch(_: Context, away: JobRecord, *__: Any) -> None:
        assert away.run_dir == f"/r/{functions.FOLDER}"
        raise error

    monkeypatch.setattr(functions, "fetch", fetch)
    assert fetch_result(Context(), run_record(Path("/r")), "0.result", Path("/here")) is False


def test_fetch_result_returns_true_if_the_result_was_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "fetch", lambda *_: SimpleNamespace(files=(Path("x"),)))
    assert fetch_result(Context(), run_record(Path("/r")), "0.result", Path("/here")) is True


def test_log_of_joins_all_attempts_of_a_rank(tmp_path: Path) -> None:
    run = run_record(tmp_path)
    assert log_of(Context(), run, "", 0) is None
    for attempt, text in ((0, "first\n"), (1, "second\n"), (2, None)):
        folder = tmp_path / "logs" / str(attempt)
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "rank-0.log").write_text(text)
    assert log_of(Context(), run, "", 0) == "first\nsecond\n"
    assert log_of(Context(), run, "", 1) is None
    task = tmp_path / "tasks" / "3" / "logs" / "0"
    task.mkdir(parents=True)
    (task / "rank-0.log").write_bytes(b"of three \xff\n")
    assert log_of(Context(), run, "3", 0) == "of three \ufffd\n"


def test_log_of_a_remote_run_returns_the_part_that_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[list[str]] = []

    def fetch(_: Context, __: JobRecord, patterns: list[str], folder: Path) -> None:
        wanted.append(patterns)
        (folder / "tasks" / "3" / "logs" / "0").mkdir(parents=True)
        (folder / "tasks" / "3" / "logs" / "0" / "rank-0.log").write_text("half")
        raise TransportError("the link is gone")

    monkeypatch.setattr(functions, "fetch", fetch)
    assert log_of(Context(), run_record(Path("/far"), mirror=str(tmp_path)), "3", 0) == "half"
    assert wanted == [["tasks/3/logs/*/rank-0.log"]]
