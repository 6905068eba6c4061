"""A compromised login node: none of its answers harms the laptop."""

from __future__ import annotations

import ast
import base64
import json
import os
import struct
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dtslurm
from dtslurm.errors import JobNotFound, LoginRefused, RequestInvalid, StoreError, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.logs.log_stream import LogRequest as WantedLogs
from dtslurm.services.logs.log_stream import LogStream
from dtslurm.services.request.request import JobRequest
from dtslurm.services.results.fetch import Fetched, fetch
from dtslurm.services.runs import records
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.sync import RECORDS
from dtslurm.services.submit import idempotency
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring import remote_query
from dtslurm.services.wiring.context import Context
from dtslurm.store.pull import Copied, PullSpec, copy
from dtslurm.transport import remote_command
from dtslurm.transport.base import Completed, Stream
from dtslurm.transport.connect import connect
from dtslurm.transport.local import LocalTransport
from dtslurm.worker.logtail import frames as wire
from tests.sshd.servers import SshLab, make_key
from tests.store.trees import write

MOST_MEMORY = 500 << 20
BOMB = zlib.compress(bytes(1 << 26), 1)


class FixedStream:
    """The bytes of a login node, in pieces; then the end of the connection."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self.ended = False

    def __iter__(self) -> FixedStream:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def read(self, timeout: float) -> bytes:
        del timeout
        piece = next(self._pieces, None)
        self.ended = piece is None
        return piece or b""

    def send(self, data: bytes) -> None:
        """Nobody reads it."""


class Hostile(LocalTransport):
    """A login node that answers every command with the same bytes."""

    def __init__(self, answer: bytes | Iterator[bytes]) -> None:
        super().__init__()
        self._answer = iter([answer]) if isinstance(answer, bytes) else answer

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        del argv, stdin
        yield FixedStream(self._answer)  # type: ignore[misc]


def frame(data: bytes = b"", **head: Any) -> bytes:
    """A frame of the program that sends files."""
    return json.dumps(head).encode() + b"\n" + data


def file_frame_of(path: Any, data: bytes = b"x", **changes: Any) -> bytes:
    head = {"run": 0, "path": path, "offset": 0, "length": len(data), "size": len(data), "mtime_ns": 0}
    return frame(data, **{**head, **changes})


END = frame(end=True)


def receive(target: Path, answer: bytes | Iterator[bytes], *patterns: str, **options: Any) -> Copied:
    pull_spec = PullSpec("/far/run", target, patterns or ("*",), **options)
    return copy(Hostile(answer), [pull_spec])


def everything_in(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


# ---- Files that the login node names ----

NOT_REQUESTED = [
    ".git/config",
    ".bashrc",
    "job.json",
    "checkpoints",
    "checkpoint/x",
    "code/train.py",
    "xcheckpoints/1",
]
OTHER_PLACES = [
    "../evil",
    "/tmp/evil",
    "checkpoints/../../evil",
    "checkpoints/..",
    "checkpoints/./x",
    "checkpoints//x",
    "checkpoints/",
    "",
    ".",
    "checkpoints/\0",
    "checkpoints/" + "x" * 300,
    "checkpoints/" + "x/" * 3000 + "y",
    "checkpoints/\ud800",
]


@pytest.mark.parametrize("path", [*NOT_REQUESTED, *OTHER_PLACES])
def test_unrequested_file_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(TransportError, match=r"not requested|another path"):
        receive(tmp_path / "here", file_frame_of(path) + END, "checkpoints/*")
    assert everything_in(tmp_path) == set()


@pytest.mark.parametrize("path", ["checkpoints/.git/config", "checkpoints/.GIT/hooks/post-checkout"])
def test_git_configuration_is_never_received(tmp_path: Path, path: str) -> None:
    with pytest.raises(TransportError, match="not requested"):
        receive(tmp_path, file_frame_of(path) + END, "checkpoints/*")


@pytest.mark.parametrize("path", [".bashrc", ".ssh/authorized_keys", "logs/.hidden", ".config/x/y"])
def test_hidden_files_are_not_received_into_a_directory_of_the_user(tmp_path: Path, path: str) -> None:
    with pytest.raises(TransportError, match="not requested"):
        receive(tmp_path, file_frame_of(path) + END, "*", hidden=False)
    assert everything_in(tmp_path) == set()


def test_hidden_files_are_received_into_a_separate_run_directory(tmp_path: Path) -> None:
    receive(tmp_path, file_frame_of(".hydra/config.yaml") + END)
    assert everything_in(tmp_path) == {".hydra/config.yaml"}


@pytest.mark.parametrize(
    "path", ["job.json", "script.sbatch", "secrets", "submitting", "x/0.json/../../job.json"]
)
def test_mirror_receives_no_run_records(tmp_path: Path, path: str) -> None:
    from dtslurm.services.runs import sync

    with pytest.raises(TransportError):
        receive(tmp_path, file_frame_of(path) + END, *RECORDS, "*", skip=sync._SKIPPED, hidden=False)
    assert everything_in(tmp_path) == set()


def test_file_name_with_control_characters_stays_inside_the_target(tmp_path: Path) -> None:
    copied = receive(tmp_path, file_frame_of("checkpoints/\x1b]0;evil\x07\n") + END, "checkpoints/*")
    assert [path.parent for path in copied.files] == [tmp_path / "checkpoints"]


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/a"])
def test_symbolic_link_in_the_target_path_is_not_followed(tmp_path: Path, link: str) -> None:
    (tmp_path / "outside").mkdir()
    place = tmp_path / "here" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "outside")
    with pytest.raises(TransportError, match="a symbolic link"):
        receive(tmp_path / "here", file_frame_of("checkpoints/a/b") + END)
    assert everything_in(tmp_path / "outside") == set()


def test_symbolic_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError):
        receive(tmp_path / "here", file_frame_of("a", b"evil") + END)
    assert (tmp_path / "outside").read_text() == "mine"


def test_fifo_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(StoreError):
        receive(tmp_path, file_frame_of("a") + END)


def test_wrong_checksum_does_not_delete_a_file_that_was_not_received(tmp_path: Path) -> None:
    """`fetch` deletes a copy whose checksum is wrong, and copies the file again."""
    (tmp_path / "mine.py").write_text("mine")
    with pytest.raises(TransportError, match="checksum"):
        receive(tmp_path, frame(run=0, path="mine.py", sha256="0" * 64) + END)


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "far/run-1"
    write(
        folder,
        {"checkpoints/1": "1", ".hydra/config.yaml": "a: 1", "sub/.git/config": "[core]", "job.json": ""},
    )
    return folder


def fetch_here(
    tmp_path: Path, folder: Path, *patterns: str, target: str | None = None, mirror: str = ""
) -> Fetched:
    cluster = SimpleNamespace(remote=False, transport=LocalTransport())
    context: Any = SimpleNamespace(
        cwd=tmp_path / "here", cluster_of=lambda _: cluster, transport=LocalTransport()
    )
    record: Any = SimpleNamespace(run_dir=str(folder), job_id="2", mirror=mirror)
    return fetch(context, record, patterns, tmp_path / "here" / target if target else None)


def test_fetch_copies_hidden_files_into_the_run_directory(tmp_path: Path) -> None:
    for _ in range(2):
        fetched = fetch_here(tmp_path, run_folder(tmp_path))
        assert everything_in(tmp_path / "here") == {
            "run-1/checkpoints/1", "run-1/.hydra/config.yaml", "run-1/job.json"
        }  # fmt: skip
        assert [(item.kind, item.names) for item in fetched.left_out] == [("hidden", ("sub/.git/config",))]


def test_fetch_copies_no_hidden_files_into_a_directory_of_the_user(tmp_path: Path) -> None:
    write(tmp_path / "here", {".bashrc": "mine", "train.py": ""})
    fetched = fetch_here(tmp_path, run_folder(tmp_path), target=".")
    assert everything_in(tmp_path / "here") == {".bashrc", "train.py", "checkpoints/1", "job.json"}
    [left] = fetched.left_out
    assert left.names == (".hydra/config.yaml", "sub/.git/config")
    assert left.reason.startswith(
        "2 hidden files: they are not written to a folder that already contained other files"
    )


def test_fetch_reports_that_all_matching_files_are_hidden(tmp_path: Path) -> None:
    write(tmp_path / "here", {"train.py": ""})
    fetched = fetch_here(tmp_path, run_folder(tmp_path), ".hydra", target=".")
    assert (fetched.files, [item.kind for item in fetched.left_out]) == ((), ["hidden"])


@pytest.mark.parametrize("patterns", [(), ("job.json",), ("*.json",)])
def test_fetch_copies_the_local_run_record(tmp_path: Path, patterns: tuple[str, ...]) -> None:
    """Otherwise `resubmit ./run-1` would run a line here that the login node wrote."""
    write(tmp_path, {"mirror/job.json": "ours"})
    folder = run_folder(tmp_path)
    fetched = fetch_here(tmp_path, folder, *patterns, mirror=str(tmp_path / "mirror"))
    assert (tmp_path / "here/run-1/job.json") in fetched.files
    assert (tmp_path / "here/run-1/job.json").read_text() == "ours"
    assert fetch_here(tmp_path, folder, *patterns, mirror=str(tmp_path / "mirror")).files == ()
    fetch_here(tmp_path, folder, "checkpoints/*", target="other", mirror=str(tmp_path / "mirror"))
    assert everything_in(tmp_path / "here/other") == {"checkpoints/1"}


def test_directory_whose_record_names_another_mirror_is_not_a_run(tmp_path: Path) -> None:
    context = Context(cwd=tmp_path)
    folder = tmp_path / "run-1"
    values = {"token": "0", "cluster": "local", "name": "n", "phase": "submitted", "created_at": 1.0}
    for mirror in (str(folder), str(tmp_path)):
        document = {"schema": 1, **values, "run_dir": "/far/run-1", "mirror": mirror}
        write(folder, {"job.json": json.dumps(document)})
        with pytest.raises(JobNotFound):
            find(context, str(folder))


@pytest.mark.ssh
@pytest.mark.parametrize("transport", ["openssh", "paramiko"])
def test_login_node_with_a_hostile_python_writes_no_unrequested_file(
    tmp_path: Path, sshd_lab: SshLab, transport: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    answer = file_frame_of("checkpoints/1") + file_frame_of(".git/config", b"[core]fsmonitor=evil") + END
    (programs / "answer").write_bytes(answer)
    (programs / "python3").write_text(f"#!/bin/sh\nexec cat {programs}/answer\n")
    (programs / "python3").chmod(0o700)
    sshd_lab.server(f"evil-{transport}")
    reached = connect(f"evil-{transport}", transport=transport, env=sshd_lab.environ())
    wanted = [PullSpec("/far/run", tmp_path / "here", ("checkpoints/*",), hidden=False)]
    with pytest.raises(TransportError, match="not requested"):
        copy(reached, wanted, python=f"{programs}/python3")
    reached.close()
    assert everything_in(tmp_path / "here") == {"checkpoints/1"}


# ---- Deletion ----


@pytest.mark.parametrize(
    "path", ["outside", "own/../outside", "own/link/file", "own", "own/.", "own/..", "", "/"]
)
def test_remove_refuses_paths_outside_the_tool_directory(tmp_path: Path, path: str) -> None:
    from dtslurm.transport.deletion import remove

    write(tmp_path, {"outside/file": "mine", "own/run/file": ""})
    (tmp_path / "own/link").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="does not delete it"):
        remove(tmp_path / path, within=tmp_path / "own")
    assert everything_in(tmp_path) == {"outside/file", "own/run/file", "own/link"}


def test_remove_deletes_a_link_and_not_its_target(tmp_path: Path) -> None:
    from dtslurm.transport.deletion import remove

    write(tmp_path, {"outside/file": "mine"})
    (tmp_path / "own").mkdir()
    (tmp_path / "own/run").symlink_to(tmp_path / "outside")
    assert remove(tmp_path / "own/run", within=tmp_path / "own")
    assert not remove(tmp_path / "own/run", within=tmp_path / "own")
    assert everything_in(tmp_path) == {"outside/file"}


def test_all_deletions_are_in_the_deletion_module() -> None:
    package = Path(dtslurm.__file__).parent
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.startswith(("worker/", "train/")) or name == "transport/deletion.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = (
                node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            )
            assert called not in {"unlink", "rmtree", "rmdir", "removedirs"}, path


@pytest.mark.parametrize("name", ["..", ".", "", "home", "x-20260101-000000-zzz", "-rf", "a b"])
def test_directory_without_a_run_name_is_not_removed(tmp_path: Path, name: str) -> None:
    from dtslurm.services.runs import records

    write(tmp_path, {"state/dtslurm/remote/x/1": "", "home/file": "mine"})
    run: list[Sequence[str]] = []
    cluster: Any = SimpleNamespace(remote=True, transport=SimpleNamespace(run=run.append))
    record: Any = SimpleNamespace(run_dir=f"{tmp_path}/{name}", folder=str(tmp_path / "home"), token="0")
    context: Any = SimpleNamespace(env={"XDG_STATE_HOME": str(tmp_path / "state")})
    with pytest.raises(StoreError, match="does not delete it"):
        records.forget(context, cluster, record, placed=True)
    assert (everything_in(tmp_path), run) == ({"state/dtslurm/remote/x/1", "home/file"}, [])


def test_symbolic_link_in_place_of_a_run_is_not_removed_on_the_cluster(tmp_path: Path) -> None:
    from dtslurm.services.runs import records

    write(tmp_path, {"root/run/file": "", "outside/file": ""})
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    for name in ("link", "run"):
        LocalTransport().run(["sh", "-c", records._REMOVE, "sh", str(tmp_path / "root"), name])
    assert everything_in(tmp_path) == {"outside/file", "root/link"}


# ---- The record of the run that was first under a key ----


class Telling(LocalTransport):
    """A login node whose commands all print the same."""

    def __init__(self, stdout: str) -> None:
        super().__init__()
        self.stdout = stdout

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        del options
        return Completed(tuple(argv), 0, self.stdout, "")


@pytest.fixture
def submitted_once(tmp_path: Path) -> tuple[Context, Prepared]:
    write(tmp_path, {"project/train.py": "", "victim/file": "mine"})
    context = Context(cwd=tmp_path / "project")
    request = JobRequest(
        script="train.py", cluster="local", time="5", once="night", run_root=str(tmp_path / "runs")
    )
    return context, prepare(context, request, standalone=False)


def known(context: Context, prepared: Prepared, remote_record: object, rest: str = "\0") -> JobRecord | None:
    document = remote_record if isinstance(remote_record, str) else json.dumps(remote_record)
    cluster: Any = SimpleNamespace(
        remote=True, name="far", path="/profiles/far.yaml", transport=Telling(f"{document}\0{rest}")
    )
    return idempotency._known(context, replace(prepared, cluster=cluster))


def record_of(prepared: Prepared, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1, "token": prepared.submission.token, "cluster": "far", "name": "theirs",
        "phase": "submitted", "run_dir": prepared.submission.run_dir, "created_at": 1.0,
        "job_id": "7", **changes,
    }  # fmt: skip


def test_local_paths_of_a_run_are_not_taken_from_the_remote_record(
    tmp_path: Path, submitted_once: tuple[Context, Prepared]
) -> None:
    context, prepared = submitted_once
    victim = str(tmp_path / "victim")
    result = record_of(
        prepared, mirror=victim, run_dir=victim, profile=victim, cluster="local", transport="local",
        sweep=victim, parent=victim, stages={"a": victim}, final=[{}],
        request={"setup": ["evil"], "cluster": "local"},
    )  # fmt: skip
    record = known(context, prepared, result, "\0withdrawn")
    assert record is not None
    assert (record.name, record.phase, record.job_id) == ("theirs", "withdrawn", "7")
    assert victim not in str(record)
    assert Path(record.mirror).parent.parent == records.mirrors(context)
    assert (record.cluster, record.transport) == (prepared.submission.cluster, prepared.transport)
    cluster: Any = SimpleNamespace(transport=Telling(""))
    with pytest.raises(StoreError, match="does not delete it"):
        idempotency._move_aside(context, cluster, replace(record, mirror=victim))
    assert (tmp_path / "victim/file").exists()


def test_request_of_a_run_is_not_taken_from_the_remote_record(
    submitted_once: tuple[Context, Prepared],
) -> None:
    """Otherwise `resubmit` would run a remote line here, and `fetch --mirror` upload to a remote server."""
    from dtslurm.services.request.experiment_trackers import _server
    from dtslurm.services.submit.resubmit import restore_request

    context, prepared = submitted_once
    result = record_of(
        prepared,
        request={"script": "train.py", "cluster": "local", "setup": ["touch evil"]},
        submitted_in=str(context.cwd),
        spec={"env": [["WANDB_BASE_URL", "https://evil"]]},
    )
    record = known(context, prepared, result)
    assert record is not None
    cluster: Any = SimpleNamespace(remote=True, name="far", transport=Telling(""))
    record, _ = idempotency._copied(context, replace(prepared, cluster=cluster), record)
    with pytest.raises(RequestInvalid, match="does not contain the request"):
        restore_request(record)
    assert _server(record) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"token": "../../x"}, {"token": 7}, {"token": None}, {"script_hash": "; rm"}, {"job_id": "7; rm"},
        {"job_id": 7}, {"job_id": "1" * 99}, {"created_at": float("nan")}, {"created_at": "1"},
        {"created_at": 1e300}, {"created_at": True}, {"name": None}, {"name": "x" * 200_000}, {"command": []},
        {"array": "x"}, {"array": 3}, {"world_size": -1}, {"world_size": 2**80}, {"world_size": True},
        {"time_limit": "1"}, {"launcher": {}},
    ],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_malformed_remote_record_is_a_transport_error(
    submitted_once: tuple[Context, Prepared], changes: dict[str, Any]
) -> None:
    context, prepared = submitted_once
    with pytest.raises(TransportError):
        known(context, prepared, record_of(prepared, **changes))


@pytest.mark.parametrize("remote_record", ["x", "[]", "7", "[" * 100_000])
def test_undecodable_remote_record_is_a_transport_error(
    submitted_once: tuple[Context, Prepared], remote_record: str
) -> None:
    context, prepared = submitted_once
    with pytest.raises(TransportError):
        known(context, prepared, remote_record)


@pytest.mark.parametrize(
    "rest",
    ['{"event": "submitted", "job_id": "7; rm"}\0', "\0job-x", '{"event": "submitted", "job_id": [7]}\0'],
)
def test_invalid_remote_job_id_is_a_transport_error(
    submitted_once: tuple[Context, Prepared], rest: str
) -> None:
    context, prepared = submitted_once
    with pytest.raises(TransportError):
        known(context, prepared, record_of(prepared, job_id=None), rest)


def test_remote_record_of_another_run_is_refused(submitted_once: tuple[Context, Prepared]) -> None:
    context, prepared = submitted_once
    other = replace(records.planned_record(context, prepared), token="0123456789ab")
    context.index.put(other)
    with pytest.raises(TransportError, match="another run"):
        known(context, prepared, record_of(prepared, token=other.token))


NASTY = "a\x1b]0;evil\x07\x1b[2Jb\x9b3J\x00\x7f"


def test_names_from_a_login_node_are_printed_without_control_characters(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from dtslurm.cli.commands.fetch import _describe_skipped
    from dtslurm.cli.printing import output
    from dtslurm.services.results.fetch import SkippedFiles

    output.note(_describe_skipped(SkippedFiles("hidden", 1, "why", (NASTY,))))
    output.show_error(StoreError(NASTY, evidence=[NASTY], hint=NASTY))
    said = capfd.readouterr()
    assert not set("\x1b\x07\x9b\x00\x7f") & set(said.err + said.out)


# ---- Frames that are none ----

WRONG_FRAMES = {
    "no JSON": b"hello\n",
    "no object": b"[1]\n",
    "a deep object": b'{"run":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a deep value": b'{"run": 0, "left":' + b"[" * 200 + b"]" * 200 + b"}\n",
    "another run": file_frame_of("a", run=1),
    "a negative run": file_frame_of("a", run=-1),
    "a run that is a boolean": file_frame_of("a", run=False),
    "a run that is a text": file_frame_of("a", run="0"),
    "no path": frame(run=0, offset=0, length=0, size=0, mtime_ns=0),
    "a path that is a number": file_frame_of(7),
    "a path that is a list": file_frame_of(["a"]),
    "a negative offset": file_frame_of("a", offset=-1),
    "a huge offset": file_frame_of("a", offset=2**80, size=2**80 + 1),
    "a hole": file_frame_of("a", offset=1 << 40, size=(1 << 40) + 1),
    "NaN as offset": file_frame_of("a", offset=float("nan")),
    "a boolean as offset": file_frame_of("a", offset=False),
    "a fraction as size": file_frame_of("a", size=1.5),
    "more than its size": file_frame_of("a", b"xx", size=1),
    "a huge time": file_frame_of("a", mtime_ns=2**80),
    "no time": file_frame_of("a", mtime_ns=None),
    "a huge length": file_frame_of("a", length=int(1e11)),
    "a negative length": file_frame_of("a", length=-5),
    "a length that is a text": file_frame_of("a", length="1"),
    "a file twice": file_frame_of("a") + file_frame_of("b") + file_frame_of("a"),
    "pieces without an end": file_frame_of("a", b"", size=9) + file_frame_of("a", b"", size=9),
    "a size that grows": file_frame_of("a", size=2) + file_frame_of("a", offset=1, size=3),
    "a reason that is a number": frame(run=0, gone=7),
    "counts that are a list": frame(run=0, left=[1]),
    "counts that are texts": frame(run=0, left={"snapshot": "1"}),
    "a checksum that is none": file_frame_of("a") + frame(run=0, path="a", sha256=None),
}  # fmt: skip


@pytest.mark.parametrize("answer", WRONG_FRAMES.values(), ids=WRONG_FRAMES.keys())
def test_malformed_frame_is_a_permanent_transport_error(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(TransportError) as caught:
        receive(tmp_path / "here", answer + END)
    assert not caught.value.transient
    assert len(caught.value.message) < 200


def endless_head() -> Iterator[bytes]:
    while True:
        yield b"x" * (1 << 16)


def endless_frames(**head: Any) -> Iterator[bytes]:
    number = 0
    while True:
        yield b"".join(frame(run=0, path=f"{n}" + "x" * 3000, **head) for n in range(number, number + 100))
        number += 100


@pytest.mark.parametrize("answer", [endless_head(), endless_frames(gone="no")], ids=["a head", "frames"])
def test_endless_frame_answer_is_limited(tmp_path: Path, answer: Iterator[bytes]) -> None:
    with pytest.raises(TransportError, match="more than"):
        receive(tmp_path, answer)


@pytest.mark.parametrize("answer", [b"", b'{"run"', file_frame_of("a", b"xx")[:-1], file_frame_of("a")])
def test_truncated_frame_answer_is_a_transient_error(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(TransportError, match="ended in the middle") as caught:
        receive(tmp_path, answer)
    assert caught.value.transient


# ---- Answers of a program ----


def packed(value: bytes, mark: str = "dtslurm-x:") -> str:
    return f"{mark}{base64.b64encode(zlib.compress(value)).decode()}\n"


@pytest.mark.parametrize(
    "answer",
    [
        packed(b"[1]"),
        packed(b"no JSON"),
        packed(b"[" * 100_000),
        packed(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
        "dtslurm-x:" + base64.b64encode(BOMB).decode() + "\n",
        "dtslurm-x:" + base64.b64encode(BOMB[:500]).decode() + "\n",
        "dtslurm-x:not base64!\n",
        "dtslurm-x:\n",
        "something else\n",
        "",
    ],
)
def test_malformed_query_answer_is_a_transport_error(answer: str) -> None:
    with pytest.raises(TransportError):
        remote_query._unpacked("dtslurm-x:", answer, "")


def artifact(**row: Any) -> dict[str, Any]:
    return {"artifacts": [{"path": "a", "kind": "output", "there": True, "bytes": 1, **row}]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"artifacts": 7},
        {"artifacts": [7]},
        {"artifacts": [{}]},
        artifact(path=7),
        artifact(path=None),
        artifact(path="a\0b"),
        artifact(metrics=7),
    ],
)
def test_malformed_artifact_list_is_a_transport_error(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtslurm.services.results import artifacts

    monkeypatch.setattr(
        artifacts, "find_worker_host", lambda *_: remote_query.WorkerHost(LocalTransport(), "python3")
    )
    monkeypatch.setattr(artifacts, "query_worker", lambda *_, **__: answer)
    record: Any = type("Record", (), {"run_dir": "/far/run"})
    with pytest.raises(TransportError):
        artifacts.listing(None, record)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{",
        "[]",
        "7",
        "[" * 100_000,
        '{"a":' + "[" * 999 + "]" * 999 + "}",
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_malformed_worker_answer_is_a_transport_error(text: str) -> None:
    from dtslurm.remote import remote_worker

    with pytest.raises(TransportError):
        remote_worker._answer(f"mark:{text}\n", "mark:")


@pytest.mark.parametrize("chunk", [b"x" * (1 << 16), b"x" * 100 + b"\n", b"\n" * 1000])
def test_endless_worker_answer_is_limited(chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtslurm.remote import answers, remote_worker

    monkeypatch.setattr(answers, "LARGEST", 1 << 20)

    def talk() -> Iterator[bytes]:
        while True:
            yield chunk

    running_worker = remote_worker._RunningWorker(Hostile(talk()), ["lib.disk"], "python3")
    running_worker._finish.detach()
    with pytest.raises(TransportError, match="more than"):
        running_worker.ask([b""], timeout=60.0)


# ---- Frames of log following ----


def log(kind: int, payload: bytes, stream: int = 1) -> bytes:
    return wire.frame(kind, stream, payload)


def file_frame(**changes: Any) -> bytes:
    values = {
        "name": "logs/0/rank-0.log", "kind": "rank", "number": 0, "attempt": 0, "task": None, "inode": 1,
        "offset": 0, "why": "new",
    }  # fmt: skip
    return log(wire.FILE, json.dumps({**values, **changes}).encode())


WRONG_LOGS = {
    "a packed frame in a packed one": log(
        wire.PACKED, zlib.compress(log(wire.PACKED, zlib.compress(log(wire.END, b""))))
    ),
    "a bomb": log(wire.PACKED, BOMB),
    "packed data that is broken": log(wire.PACKED, b"xxxx"),
    "packed data that is cut off": log(wire.PACKED, zlib.compress(bytes(1000))[:-6]),
    "a frame too large": struct.pack(">IBI", 1 << 25, wire.DATA, 1),
    "a file that is a list": log(wire.FILE, b"[]"),
    "a file of deep JSON": log(wire.FILE, b"[" * 100_000),
    "a file of no name": file_frame(name=None),
    "a reason that is a list": file_frame(why=[]),
    "a name of another place": file_frame(name="../x"),
    "a name too long": file_frame(name="x" * 300),
    "a kind that is a list": file_frame(kind=[]),
    "a number that is a boolean": file_frame(number=True),
    "a huge number": file_frame(number=2**80),
    "a negative offset": file_frame(offset=-1),
    "a huge offset": file_frame(offset=2**80),
    "an offset that is NaN": file_frame(offset=float("nan")),
    "a task that is no number": file_frame(task="\u0663\u0662x"),
    "a task too long": file_frame(task="1" * 5000),
    "bytes of no file": log(wire.DATA, bytes(9), stream=7),
    "bytes without their place": file_frame() + log(wire.DATA, b"x"),
    "bytes of another place": file_frame() + log(wire.DATA, struct.pack(">Q", 2**60) + b"x"),
    "a summary of no file": log(wire.SUMMARY, b'[[9, 1, 1, "", ""]]'),
    "a summary that is a number": log(wire.SUMMARY, b"7"),
    "a summary with huge numbers": file_frame() + log(wire.SUMMARY, b"[[1, 1e999, 1, 1, 1]]"),
    "a summary of lists": log(wire.SUMMARY, b'[[[], 1, 1, "", ""]]'),
}  # fmt: skip


@pytest.mark.parametrize("answer", WRONG_LOGS.values(), ids=WRONG_LOGS.keys())
def test_malformed_log_frame_is_a_permanent_transport_error(answer: bytes) -> None:
    stream = LogStream(Hostile(wire.MAGIC + answer), WantedLogs("/far/run"), python="python3")
    with pytest.raises(TransportError) as caught:
        stream.read(0.1)
    assert not caught.value.transient


@pytest.mark.parametrize(
    "frames_sent",
    [log(wire.CAUGHT_UP, b'{"first": 7}'), log(wire.CAUGHT_UP, b'{"first": {"": true}}'),
     log(wire.HELLO, b'{"utc_offset": 1e400}'), log(wire.HELLO, b'{"utc_offset": %d}' % 10**30)],
)  # fmt: skip
def test_log_frame_with_implausible_values_is_ignored(frames_sent: bytes) -> None:
    stream = LogStream(Hostile(wire.MAGIC + frames_sent), WantedLogs("/far/run"), python="python3")
    stream.read(0.1)
    assert abs(stream.utc_offset) < 86_400
    assert not stream._first


@pytest.mark.parametrize("line", ["[" * 100_000, "{", "7", '{"a": 1'])
def test_malformed_event_line_is_skipped(line: str) -> None:
    sent = file_frame(name="events.jsonl", kind="events") + log(
        wire.DATA, struct.pack(">Q", 0) + line.encode() + b'\n{"event": "x"}\n'
    )
    stream = LogStream(Hostile(wire.MAGIC + sent), WantedLogs("/far/run"), python="python3")
    [record] = stream.read(0.1)
    assert record.values == {"event": "x"}  # type: ignore[union-attr]


# ---- The end of a command ----


@pytest.mark.parametrize("word", ["", "x", "-1 -", "1", "0 z", "9" * 5000 + " -", "\u0663 -", "0 - -"])
def test_malformed_exit_code_is_a_transport_error(word: str) -> None:
    answer = remote_command.CallOutputs("nonce")
    answer.feed(b"\x1enonce-begin 1\x1ex\x1enonce-end " + word.encode("utf-8") + b"\x1e", b"")
    with pytest.raises(TransportError):
        answer.verdict()


@pytest.mark.parametrize("begun", [False, True])
def test_unterminated_mark_is_limited(begun: bool) -> None:
    answer = remote_command.CallOutputs("nonce")
    answer.feed(b"\x1enonce-begin 1\x1e\x1enonce-end " if begun else b"\x1enonce-begin ", b"")
    with pytest.raises(TransportError):
        deque((answer.feed(b"1" * (1 << 16), b"") for _ in range(1000)), maxlen=0)


# ---- Keys of hosts ----

LAX = ("StrictHostKeyChecking no", "StrictHostKeyChecking off", "StrictHostKeyChecking accept-new")


@pytest.mark.ssh
@pytest.mark.parametrize("transport", ["openssh", "paramiko"])
@pytest.mark.parametrize("state", ["unknown", "changed", "revoked", "jump"])
def test_unknown_changed_or_revoked_host_key_is_refused_despite_a_lax_configuration(
    sshd_lab: SshLab, tmp_path: Path, transport: str, state: str
) -> None:
    alias = f"{transport}-{state}"
    server = sshd_lab.server(alias, client=LAX[:1], known=False)
    known = {
        "unknown": "",
        "changed": f"[127.0.0.1]:{server.port} {make_key(tmp_path / 'other')}\n",
        "revoked": f"[127.0.0.1]:{server.port} {server.host_key}\n@revoked * {server.host_key}\n",
        "jump": "",
    }[state]
    with sshd_lab.known_hosts.open("a") as file:
        file.write(known)
    if state == "jump":
        behind = sshd_lab.server(f"{alias}-behind")
        alias = f"{alias}-through"
        sshd_lab.host(alias, behind.port, f"ProxyJump {transport}-jump", *LAX[:1])
    reached = connect(alias, transport=transport, env=sshd_lab.environ())
    with pytest.raises(LoginRefused):
        reached.run(["true"])
    reached.close()
    assert "Accepted" not in server.log


@pytest.mark.ssh
@pytest.mark.parametrize("lax", LAX)
def test_unknown_host_key_is_not_added_to_known_hosts(sshd_lab: SshLab, lax: str) -> None:
    alias = lax.replace(" ", "-")
    server = sshd_lab.server(alias, client=[lax], known=False)
    before = sshd_lab.known_hosts.read_text()
    reached = connect(alias, transport="openssh", env=sshd_lab.environ())
    with pytest.raises(LoginRefused):
        reached.run(["true"])
    assert sshd_lab.known_hosts.read_text() == before
    assert "Accepted" not in server.log


@pytest.mark.ssh
def test_ssh_configuration_path_with_special_characters_is_read(sshd_lab: SshLab, tmp_path: Path) -> None:
    sshd_lab.server("named")
    config = tmp_path / "a b*[c]?%d"
    config.write_text(sshd_lab.config.read_text())
    env = {**sshd_lab.environ(), "DTSLURM_SSH_CONFIG": str(config)}
    assert connect("named", transport="openssh", env=env).run(["echo", "x"]).stdout == "x\n"


# ---- Memory ----

GREEDY = """
import sys, zlib
sys.setrecursionlimit(1000)
from pathlib import Path
import base64
from dtslurm.errors import TransportError
from dtslurm.logs import frames
from dtslurm.services.wiring import remote_query
from dtslurm.worker.logtail import frames as wire
from tests.security.test_compromised_login_node import endless_head, file_frame_of, log, receive

def harmless(attack):
    try:
        attack()
    except TransportError:
        return
    raise SystemExit(f"{attack} gave no error")

packer = zlib.compressobj(1)
BOMB = b"".join(packer.compress(bytes(1 << 20)) for _ in range(600)) + packer.flush()
harmless(lambda: list(frames.Decoder().feed(wire.MAGIC + log(wire.PACKED, BOMB))))
harmless(lambda: remote_query._unpacked("m:", "m:" + base64.b64encode(BOMB).decode() + "\\n", ""))
nested = b'{"a": [' + b"[[]]," * ((10 << 20) // 5) + b"0]}"
remote_query._unpacked("m:", "m:" + base64.b64encode(zlib.compress(nested)).decode() + "\\n", "")
for answer in (file_frame_of("a", length=int(1e11)), endless_head()):
    harmless(lambda: receive(Path(sys.argv[1]), answer if not isinstance(answer, bytes) else
                             (part for parts in ([answer], endless_head()) for part in parts)))
# ru_maxrss would count the process that started this one, too
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(int(peak) << 10)
"""


def test_hostile_answers_use_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GREEDY, str(tmp_path)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_MEMORY
