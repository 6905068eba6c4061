"""A delivered run is complete or absent, locally and over a remote transport."""

from __future__ import annotations

import ast
import json
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import (
    CommandNotFound,
    CommandTimeout,
    RequestInvalid,
    RunExists,
    StoreError,
    TransportError,
)
from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.remote.worker_program import BOOT, worker_source
from dtslurm.store.delivery import MODULES, Delivery, SubmitCommand, deliver
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.snapshot import Snapshot, SnapshotFile
from dtslurm.store.wire_format import packed_request, request
from dtslurm.transport.base import Completed, Transport
from tests.store.trees import HERE, PYTHON, FarSide, repository, snap, write

WORKER = Path(__file__).parents[2] / "dtslurm" / "worker"
FILES = {"job.json": b'{"schema": 1}', "script.sbatch": b"#!/bin/bash\n\xff", "logs/batch.log": b""}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        "train.py": "print(1)\n", "lib/a.py": "", "lib/deep/b.py": "x" * 5000, "data.bin": os.urandom(3000),
        "copy.py": "print(1)\n", "caf\udce9\n.txt": "odd",
    }  # fmt: skip
    folder = repository(tmp_path / "tree", files)
    (folder / "copy.py").chmod(0o755)
    (folder / "link").symlink_to("lib/a.py")
    return folder


@pytest.fixture(params=["here", "far"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return HERE if request.param == "here" else FarSide()


def delivery(tmp_path: Path, snapshot: Snapshot | None = None, name: str = "run") -> Delivery:
    return Delivery(str(tmp_path / "root" / name), str(tmp_path / "root" / ".objects"), FILES, snapshot)


def send_delivery(
    transport: Transport, what: Delivery, *then: str, known: KnownObjects | None = None, timeout: float = 60
) -> Completed | None:
    return deliver(
        transport,
        what,
        SubmitCommand(then, timeout=timeout),
        worker=RemoteWorker(transport, MODULES, PYTHON),
        known_objects=known,
    )


def run_root_entries(tmp_path: Path) -> list[str]:
    """Return the entries of the run root except the object store."""
    root = tmp_path / "root"
    return sorted(path.name for path in root.iterdir() if path.name != ".objects") if root.exists() else []


def test_a_run_is_delivered_with_its_code(tmp_path: Path, tree: Path, transport: Transport) -> None:
    assert send_delivery(transport, delivery(tmp_path, snap(tree / "lib"))) is None
    run = tmp_path / "root" / "run"
    for name, content in FILES.items():
        assert (run / name).read_bytes() == content
    for path in tree.rglob("*"):
        if ".git" in path.relative_to(tree).parts:
            continue
        there = run / "code" / path.relative_to(tree)
        if path.is_symlink():
            assert there.readlink() == path.readlink()
        elif path.is_file():
            assert there.read_bytes() == path.read_bytes()
            assert os.access(there, os.X_OK) == bool(path.stat().st_mode & 0o100)
    assert run_root_entries(tmp_path) == ["run"]


def test_c21_delivered_files_are_private(tmp_path: Path, tree: Path, transport: Transport) -> None:
    old = os.umask(0)
    try:
        send_delivery(transport, delivery(tmp_path, snap(tree)), "echo", "17")
    finally:
        os.umask(old)
    for path in (tmp_path / "root").rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif not path.is_symlink():
            assert mode in (
                {0o400, 0o500} if "code" in path.parts or ".objects" in path.parts else {0o600}
            ), path


def test_two_runs_share_file_contents(tmp_path: Path, tree: Path, transport: Transport) -> None:
    send_delivery(transport, delivery(tmp_path, snap(tree), "one"))
    (tree / "train.py").write_text("print(2)\n")
    send_delivery(transport, delivery(tmp_path, snap(tree), "two"))
    result, two = (tmp_path / "root" / name / "code" for name in ("one", "two"))
    assert (result / "data.bin").stat().st_ino == (two / "data.bin").stat().st_ino
    assert (result / "train.py").read_text() == "print(1)\n"
    assert (two / "train.py").read_text() == "print(2)\n"


def test_editing_the_tree_does_not_change_a_delivered_run(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    send_delivery(transport, delivery(tmp_path, snap(tree)))
    with (tree / "train.py").open("r+") as file:
        file.write("broken")
    assert (tmp_path / "root" / "run" / "code" / "train.py").read_text() == "print(1)\n"


def test_a_run_without_code_is_delivered(tmp_path: Path, transport: Transport) -> None:
    send_delivery(transport, delivery(tmp_path))
    assert sorted(path.name for path in (tmp_path / "root" / "run").iterdir()) == [
        "job.json",
        "logs",
        "script.sbatch",
    ]
    assert not (tmp_path / "root" / ".objects").exists()


def test_an_empty_subfolder_is_created_as_working_directory(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    (tree / "empty" / "deep").mkdir(parents=True)
    send_delivery(transport, delivery(tmp_path, snap(tree / "empty" / "deep")))
    assert (tmp_path / "root" / "run" / "code" / "empty" / "deep").is_dir()


def test_the_result_of_the_command_after_delivery_is_returned(tmp_path: Path, transport: Transport) -> None:
    done = send_delivery(transport, delivery(tmp_path), "sh", "-c", "printf 'out\\377'; echo err >&2; exit 3")
    assert done is not None
    assert (done.code, done.stdout, done.stderr) == (3, "out\udcff", "err\n")
    assert not (tmp_path / "root" / "run" / "events.jsonl").exists()


def test_f17_the_delivery_is_complete_when_the_command_starts(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    what = delivery(tmp_path, snap(tree))
    done = send_delivery(
        transport, what, "sh", "-c", f"cd '{what.run_dir}' && cat job.json code/train.py; cat"
    )
    assert done is not None
    assert done.stdout == '{"schema": 1}print(1)\n'  # and its own stdin is empty


@pytest.mark.parametrize("printed", ["17", "17;cluster", "a plugin says hello\n17"])
def test_the_submission_event_is_written_at_the_destination(
    tmp_path: Path, transport: Transport, printed: str
) -> None:
    deliver(
        transport,
        delivery(tmp_path),
        SubmitCommand(["echo", printed], event={"cluster": "x"}),
        worker=RemoteWorker(transport, MODULES, PYTHON),
    )
    event = json.loads((tmp_path / "root" / "run" / "events.jsonl").read_text())
    assert (event["event"], event["job_id"], event["cluster"]) == ("submitted", "17", "x")
    assert event["time"] > 0


def test_a_missing_command_is_reported_before_the_run_is_placed(tmp_path: Path, transport: Transport) -> None:
    with pytest.raises(CommandNotFound, match="no-such-sbatch"):
        send_delivery(transport, delivery(tmp_path), "no-such-sbatch")
    assert run_root_entries(tmp_path) == []


def test_a_command_that_does_not_end_is_killed_with_an_unknown_result(
    tmp_path: Path, transport: Transport
) -> None:
    with pytest.raises(CommandTimeout):
        send_delivery(transport, delivery(tmp_path), "sh", "-c", "sleep 60", timeout=1)
    assert run_root_entries(tmp_path) == ["run"]


def test_an_existing_run_directory_is_not_changed(tmp_path: Path, tree: Path, transport: Transport) -> None:
    run = tmp_path / "root" / "run"
    write(run, {"mine": "x"})
    with pytest.raises(RunExists, match="already") as caught:
        send_delivery(transport, delivery(tmp_path, snap(tree)), "touch", str(tmp_path / "ran"))
    assert caught.value.exit_code == 2
    assert [path.name for path in run.iterdir()] == ["mine"]
    assert not (tmp_path / "ran").exists()
    assert run_root_entries(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "empty"])
def test_a_delivery_never_replaces_an_existing_path(tmp_path: Path, transport: Transport, kind: str) -> None:
    run = tmp_path / "root" / "run"
    run.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        run.write_text("")
    elif kind == "empty":
        run.mkdir()
    else:
        run.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    with pytest.raises(RunExists):
        send_delivery(transport, delivery(tmp_path))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_changed_after_the_snapshot_stops_the_delivery(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    taken = snap(tree)
    (tree / "lib" / "deep" / "b.py").write_text("y" * 5000)
    with pytest.raises(StoreError, match=r"b\.py was changed") as caught:
        send_delivery(transport, delivery(tmp_path, taken))
    assert "submit again" in caught.value.hint
    (tree / "lib" / "deep" / "b.py").unlink()
    with pytest.raises(StoreError, match="was deleted"):
        send_delivery(transport, delivery(tmp_path, taken))
    assert run_root_entries(tmp_path) == []
    send_delivery(transport, delivery(tmp_path, snap(tree)))


def test_a_corrupted_stored_object_is_replaced(tmp_path: Path, tree: Path, transport: Transport) -> None:
    send_delivery(transport, delivery(tmp_path, snap(tree), "one"))
    spoilt = tmp_path / "root" / "one" / "code" / "data.bin"
    spoilt.chmod(0o600)
    spoilt.write_bytes(b"x" * 3000)
    known_objects = KnownObjects(tmp_path / "known")
    known_objects.save(frozenset(delivery(tmp_path, snap(tree)).contents()))
    send_delivery(transport, delivery(tmp_path, snap(tree), "two"), known=known_objects)
    assert (tmp_path / "root" / "two" / "code" / "data.bin").read_bytes() == (tree / "data.bin").read_bytes()


# Over a link


def test_a_second_delivery_sends_only_changes_in_one_request(tmp_path: Path, tree: Path) -> None:
    write(tree, {f"many/{number}.py": f"x = {number}\n" * 50 for number in range(300)})
    far, known = FarSide(), KnownObjects(tmp_path / "known.json")
    send_delivery(far, delivery(tmp_path, snap(tree), "one"), known=known)
    first = far.sent.copy()
    (tree / "train.py").write_text("print(2)\n")
    send_delivery(far, delivery(tmp_path, snap(tree), "two"), known=known)
    assert len(far.sent) == len(first) + 1
    assert far.sent[-1] < 25_000 + len(worker_source(*MODULES))
    assert (tmp_path / "root" / "two" / "code" / "train.py").read_text() == "print(2)\n"


def test_objects_deleted_on_the_cluster_are_sent_again(tmp_path: Path, tree: Path) -> None:
    far, known = FarSide(), KnownObjects(tmp_path / "known.json")
    send_delivery(far, delivery(tmp_path, snap(tree), "one"), known=known)
    for path in (tmp_path / "root" / ".objects").rglob("*"):
        if path.is_file():
            path.unlink()
    send_delivery(far, delivery(tmp_path, snap(tree), "two"), known=known)
    assert len(far.sent) == 3
    assert (tmp_path / "root" / "two" / "code" / "train.py").read_text() == "print(1)\n"


def test_a_large_delivery_asks_for_missing_objects_first_and_reports_progress(
    tmp_path: Path, tree: Path
) -> None:
    write(tree, {"a.bin": os.urandom(1_000_000), "b.txt": "text " * 200_000})
    far = FarSide()
    seen: list[tuple[int, int]] = []
    deliver(
        far,
        delivery(tmp_path, snap(tree)),
        worker=RemoteWorker(far, MODULES, PYTHON),
        progress=lambda sent, total: seen.append((sent, total)),
    )
    assert len(far.sent) == 2
    assert far.sent[0] < 20_000
    assert far.sent[1] < 1_200_000  # text is packed, what is packed already is not
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 2_000_000


class Noisy(FarSide):
    """A login shell that prints before and after."""

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        done = super().run(argv, **options)
        return replace(done, stdout=f"*** welcome ***\n{done.stdout}bye\n")


def test_f19_a_banner_does_not_hide_the_answer(tmp_path: Path) -> None:
    done = send_delivery(Noisy(), delivery(tmp_path), "echo", "17")
    assert done is not None
    assert done.stdout == "17\n"


def test_missing_python_and_a_missing_answer_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(CommandNotFound):
        deliver(FarSide(), delivery(tmp_path), worker=RemoteWorker(FarSide(), MODULES, "no-such-python"))
    with pytest.raises(TransportError, match="unknown"):
        deliver(FarSide(), delivery(tmp_path), worker=RemoteWorker(FarSide(), MODULES, "true"))
    assert run_root_entries(tmp_path) == []


class Cut(FarSide):
    """A link that is cut after so many bytes; what arrived is worked on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def run(self, argv: Sequence[str], *, stdin: bytes | Iterable[bytes] = b"", **options: Any) -> Completed:
        super().run(
            argv, stdin=(stdin if isinstance(stdin, bytes) else b"".join(stdin))[: self.after], **options
        )
        raise TransportError("cut")


def test_an_interrupted_transfer_places_nothing_and_is_continued(tmp_path: Path, tree: Path) -> None:
    write(tree, {f"big/{number}": os.urandom(100_000) for number in range(30)})
    taken = snap(tree)
    far = FarSide()
    send_delivery(far, delivery(tmp_path, taken, "whole"))
    sent = far.sent[-1]
    again = tmp_path / "again"
    for after in (0, 100, 5000, sent // 3, sent // 2):
        with pytest.raises(TransportError):
            send_delivery(Cut(after), delivery(again, taken))
        assert run_root_entries(again) == []
    everything = delivery(again, taken).contents()
    with pytest.raises(TransportError):  # cut in the second round: the first only asks
        deliver(
            SecondCut(sent // 2),
            delivery(again, taken),
            worker=RemoteWorker(SecondCut(sent // 2), MODULES, PYTHON),
        )
    assert run_root_entries(again) == []
    kept = [path for path in (again / "root" / ".objects").rglob("*") if path.is_file()]
    assert 5 < len(kept) < len(everything)
    far = FarSide()
    send_delivery(far, delivery(again, taken))
    assert far.sent[-1] < sent * 0.6
    assert run_root_entries(again) == ["run"]


class SecondCut(Cut):
    def run(self, argv: Sequence[str], *, stdin: bytes | Iterable[bytes] = b"", **options: Any) -> Completed:
        if not self.sent:
            return FarSide.run(self, argv, stdin=stdin, **options)
        return super().run(argv, stdin=stdin, **options)


# What a far side refuses


def raw_answer(tmp_path: Path, **changes: object) -> tuple[int, str]:
    asked = {**request(delivery(tmp_path), [], 10, {}), **changes}
    source = worker_source(*MODULES)
    argv = [PYTHON, "-I", "-S", "-c", BOOT, str(len(source)), "mark:"]
    done = HERE.run(argv, stdin=source + packed_request(asked) + b".")
    assert "Traceback" not in done.stderr
    return done.code, done.stdout


DIGEST = "0" * 32


@pytest.mark.parametrize(
    "changes",
    [
        {"tree": [["../x", DIGEST, 1]]},
        {"tree": [["/etc/x", DIGEST, 1]]},
        {"tree": [["a/../../x", DIGEST, 1]]},
        {"tree": [["a//x", DIGEST, 1]]},
        {"tree": [["", DIGEST, 1]]},
        {"tree": [["a/.", DIGEST, 1]]},
        {"tree": [["a\0b", DIGEST, 1]]},
        {"tree": [["a", None, "/etc"], ["a/passwd", DIGEST, 1]]},
        {"tree": [["a", None, "x"], ["a", None, "y"]]},
        {"tree": [["a", "../../../etc/passwd", 1]]},
        {"tree": [["a", DIGEST + "\n", 1]]},
        {"tree": [["a", 5, 1]]},
        {"tree": 5},
        {"tree": [], "inside": "../up"},
        {"tree": [["a", None, "/etc"]], "inside": "a"},
        {"tree": [["a", None, "/etc"]], "inside": "a/b"},
        {"files": [["../x", 384, ""]]},
        {"files": [["/x", 384, ""]]},
        {"files": [["code/x", 384, ""]], "tree": [["x", None, "y"]]},
        {"files": [["code", 384, ""]], "tree": [["x", None, "y"]]},
        {"files": [["x", 384, "☃"]]},
        {"run_dir": "relative"},
        {"run_dir": "/a/../b"},
        {"run_dir": "/"},
        {"objects": "/a/./b"},
        {"run_dir": None},
    ],
    ids=str,
)
def test_c25_hostile_paths_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    code, answer = raw_answer(tmp_path, **changes)
    assert code == 76
    assert "refused" in answer
    assert run_root_entries(tmp_path) == []


def test_c25_hostile_paths_are_refused_locally(tmp_path: Path) -> None:
    bad = Snapshot(tmp_path, "", (SnapshotFile("../x", target="y"),))
    with pytest.raises(RequestInvalid, match="not a path below"):
        send_delivery(HERE, delivery(tmp_path, bad))


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x05abc", b"\0\0\0\x03abc.", b"\xff" * 40])
def test_malformed_input_gives_an_exit_code_without_a_traceback(data: bytes) -> None:
    source = worker_source(*MODULES)
    argv = [PYTHON, "-I", "-S", "-c", BOOT, str(len(source)), "mark:"]
    done = HERE.run(argv, stdin=source + data)
    assert "Traceback" not in done.stderr
    assert done.code in {76, 77}


def test_content_that_does_not_match_its_checksum_is_refused(tmp_path: Path) -> None:
    source = worker_source(*MODULES)
    asked = {**request(delivery(tmp_path), [], 10, {}), "tree": [["a", DIGEST, 1]]}
    blob = b"r" + bytes([32]) + DIGEST.encode() + b"\0\0\0\x01x" + b"\0\0\0\0"
    argv = [PYTHON, "-I", "-S", "-c", BOOT, str(len(source)), "mark:"]
    done = HERE.run(argv, stdin=source + packed_request(asked) + blob + b".")
    assert (done.code, "does not match its checksum" in done.stdout) == (76, True)
    assert run_root_entries(tmp_path) == []


def test_c26_an_objects_folder_that_others_can_write_is_refused(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    objects = tmp_path / "root" / ".objects"
    objects.mkdir(parents=True)
    objects.chmod(0o777)
    with pytest.raises(RequestInvalid, match="other users can write to"):
        send_delivery(transport, delivery(tmp_path, snap(tree)))
    assert run_root_entries(tmp_path) == []


@pytest.mark.parametrize("name", [*MODULES, "telemetry.telemetry", "delivery.reclaim", "delivery.send"])
def test_the_delivery_programs_are_valid_python_3_6(name: str) -> None:
    ast.parse((WORKER / (name.replace(".", "/") + ".py")).read_text(), feature_version=(3, 6))


def test_the_delivery_program_needs_only_the_standard_library() -> None:
    assert b"dtslurm." not in zlib.decompress(worker_source(*MODULES)).replace(b"dtslurm.worker", b"")
