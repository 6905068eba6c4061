"""The delivery server: it installs a run from standard input and answers, whatever bytes arrive."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.delivery import prebuilt_tree, server
from dtslurm.worker.delivery.objects import DIGEST_LENGTH

CODE = b"print(1)\n" * 100
TOOL = b"#!/bin/sh\n"


def key(data: bytes, executable: bool = False) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH] + ("x" if executable else "")


def length(count: int) -> bytes:
    return struct.pack(">I", count)


def blob(name: str, data: bytes, packed: bool = False) -> bytes:
    sent = zlib.compress(data) if packed else data
    parts = [sent[at : at + 7] for at in range(0, len(sent), 7)]
    content = b"".join(length(len(part)) + part for part in parts) + length(0)
    return (b"z" if packed else b"r") + bytes([len(name)]) + name.encode() + content


class Side:
    """A request for a run below a folder, and the bytes that carry it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run, self.objects = folder / "runs/a", folder / "runs/.objects"
        self.request: dict[str, Any] = {
            "run_dir": str(self.run),
            "objects": str(self.objects),
            "files": [["job.json", 0o600, "{}"], ["bin/start", 0o700, "\xff"]],
            "tree": [
                ["train.py", key(CODE), len(CODE)],
                ["lib/tool", key(TOOL, True), len(TOOL)],
                ["link", None, "train.py"],
            ],
            "inside": "lib/job",
            "then": [],
            "limit": 60.0,
            "event": {"cluster": "c"},
            "spare": None,
        }
        self.blobs = blob(key(CODE), CODE, packed=True) + blob(key(TOOL, True), TOOL)

    def data(self, **more: Any) -> bytes:
        packed = zlib.compress(json.dumps({**self.request, **more}).encode("ascii"))
        return length(len(packed)) + packed + self.blobs + b"."

    def send(self, data: bytes | None = None, **more: Any) -> dict[str, Any]:
        """Return the answer; every byte that was sent must have been read, for the sender listens after."""
        file = io.BytesIO(self.data(**more) if data is None else data)
        answer, _ = server.serve(server.InputStream(file))
        self.left = file.read()
        return answer

    def unplaced(self) -> bool:
        """Whether there is nothing of the run, and nothing unfinished."""
        return not self.run.exists() and not list(self.folder.glob("runs/.dtslurm-*"))


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def test_run_is_installed_with_its_code(side: Side) -> None:
    assert side.send() == {"done": {}}
    code = side.run / "code"
    assert (code / "train.py").read_bytes() == CODE
    assert (code / "link").readlink() == Path("train.py")
    assert (code / "lib/job").is_dir()
    assert os.access(code / "lib/tool", os.X_OK)
    assert (side.run / "job.json").read_text() == "{}"
    assert (side.run / "bin/start").read_bytes() == b"\xff"
    modes = {oct((side.run / name).stat().st_mode & 0o777) for name in (".", "bin/start", "code/lib")}
    assert modes == {"0o700"}
    assert not list(side.folder.glob("runs/.dtslurm-*"))


def test_objects_already_in_the_store_are_not_needed_again(side: Side) -> None:
    side.send()
    side.blobs = b""
    assert side.send(run_dir=f"{side.folder}/runs/b") == {"done": {}}
    first, second = (side.folder / f"runs/{name}/code/train.py" for name in "ab")
    assert first.stat().st_ino == second.stat().st_ino  # one file for both


def test_missing_objects_are_requested_and_nothing_is_installed(side: Side) -> None:
    side.blobs = blob(key(CODE), CODE)
    assert side.send() == {"missing": [key(TOOL, True)]}
    assert side.unplaced()


def test_run_without_code_needs_no_objects(side: Side) -> None:
    side.blobs = b""
    assert side.send(tree=None, inside="") == {"done": {}}
    assert not (side.run / "code").exists()
    assert not side.objects.exists()


def test_f2_link_cut_at_any_byte_installs_no_run(side: Side) -> None:
    data = side.data()
    for at in [*range(0, len(data), 17), len(data) - 1]:
        assert list(side.send(data[:at])) == ["cut"]
        assert side.unplaced()
    assert (side.objects / key(CODE)[:2] / key(CODE)[2:]).read_bytes() == CODE  # what came whole is kept


def test_object_that_does_not_match_its_checksum_is_refused(side: Side) -> None:
    side.blobs = blob(key(CODE), b"something else") + blob(key(TOOL, True), TOOL)
    assert side.send() == {"refused": f"the content of object {key(CODE)} does not match its checksum"}
    assert side.left == b""
    assert side.unplaced()
    side.blobs = blob("../../etc", CODE)
    assert side.send() == {"refused": "'../../etc' is not an object"}


def test_object_store_that_other_users_can_write_to_is_refused(side: Side) -> None:
    side.objects.mkdir(parents=True)
    side.objects.chmod(0o777)
    assert side.send() == {"refused": f"other users can write to {side.objects}"}
    assert side.left == b""
    assert side.unplaced()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"run_dir": "runs/a"}, "run_dir 'runs/a' is not an absolute, normalized path"),
        ({"run_dir": "/"}, "not an absolute, normalized path"),
        ({"objects": "/x/../y"}, "objects '/x/../y' is not an absolute"),
        ({"files": [["../x", 384, ""]]}, "'../x' is not a path below the run directory"),
        ({"files": [["/x", 384, ""]]}, "'/x' is not a path below"),
        ({"files": [["a\0b", 384, ""]]}, "is not a path below"),
        ({"inside": "lib/../.."}, "'code/lib/../..' is not a path below"),
        ({"files": [["a", 384, ""], ["a", 384, ""]]}, "a path occurs twice"),
        ({"files": [["a", 384, ""], ["a/b", 384, ""]]}, "'a' cannot be a folder and a file or link at once"),
        ({"inside": "train.py"}, "'code/train.py' cannot be a folder and a file"),
        ({"tree": [["x", "short", 1]]}, "'short' is not an object ('x')"),
        ({"tree": [["x", f"{'0' * 32}\n{'0' * 32}", 1]]}, "is not an object"),
        ({"tree": 7}, "the request is invalid: TypeError"),
    ],
)
def test_unsafe_or_malformed_requests_are_refused(side: Side, more: Mapping[str, Any], words: str) -> None:
    answer = side.send(**more)
    assert list(answer) == ["refused"]
    assert words in answer["refused"]
    assert side.unplaced()


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"no JSON"), zlib.compress(b"[]")])
def test_undecodable_requests_are_refused(side: Side, packed: bytes) -> None:
    assert list(side.send(length(len(packed)) + packed)) == ["refused"]


def test_empty_request_is_answered_as_a_ping(side: Side) -> None:
    assert side.send(length(0)) == {"done": {}}


def test_existing_run_directory_is_not_changed(side: Side) -> None:
    side.run.mkdir(parents=True)
    (side.run / "mine").touch()
    assert side.send() == {"exists": str(side.run)}
    assert [path.name for path in side.run.iterdir()] == ["mine"]


def test_disk_error_is_answered_with_its_path(side: Side) -> None:
    (side.folder / "runs").write_text("in the way")
    answer = side.send()["disk"]
    assert (answer["verb"], answer["path"].startswith(f"{side.folder}/runs")) == ("make", True)


# ---- The command ----


def test_command_runs_after_the_run_is_installed_and_its_job_is_recorded(side: Side) -> None:
    then = ["sh", "-c", f"cat {side.run}/job.json >&2; echo 'Submitted'; echo '17;lab'"]
    assert side.send(then=then) == {
        "done": {"code": 0, "stdout": "Submitted\n17;lab\n", "stderr": "{}", "late": False}
    }
    document = json.loads((side.run / "events.jsonl").read_text())
    assert (document["event"], document["job_id"], document["cluster"]) == ("submitted", "17", "c")


@pytest.mark.parametrize(("words", "code"), [("echo 17; exit 3", 3), ("echo no number", 0)])
def test_failed_command_or_output_without_a_job_id_records_no_job(side: Side, words: str, code: int) -> None:
    assert side.send(then=["sh", "-c", words])["done"]["code"] == code
    assert not (side.run / "events.jsonl").exists()


@pytest.mark.slow
def test_hanging_command_is_ended_with_its_children(side: Side) -> None:
    done = side.send(then=["sh", "-c", "echo begun; sleep 600 | cat"], limit=10)["done"]
    assert (done["late"], done["code"], done["stdout"]) == (True, -9, "begun\n")


@pytest.mark.parametrize("program", ["no-such-sbatch", "/no/such/sbatch"])
def test_run_is_not_installed_when_the_command_does_not_exist(side: Side, program: str) -> None:
    assert side.send(then=[program]) == {"done": {"absent": program}}
    assert side.unplaced()


# ---- The program ----


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: bytes, *words: str) -> Any:
    """Run the program with these bytes as its input; return its exit code and its answers."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    monkeypatch.setattr(os, "umask", lambda _mode: 0)
    with os.fdopen(reading, "rb") as file:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        monkeypatch.setattr(sys, "argv", ["worker", "9", "mark:", *words])
        code = server.main()
    lines = capsys.readouterr().out.splitlines()
    return code, [json.loads(line.partition("mark:")[2]) for line in lines if line]


def test_server_handles_a_single_request_or_all_requests(
    side: Side, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = side.data() + side.data(run_dir=f"{side.folder}/runs/b")
    assert run(monkeypatch, capsys, two) == (0, [{"done": {}}])
    assert not (side.folder / "runs/b").exists()
    result = [{"exists": str(side.run)}, {"done": {}}]
    assert run(monkeypatch, capsys, two, "keep") == (0, result)


@pytest.mark.parametrize(("bad", "key", "code"), [(length(3) + b"abc", "refused", 76), (b"\0", "cut", 77)])
def test_bytes_after_a_malformed_request_are_not_read_as_a_request(
    side: Side,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bad: bytes,
    key: str,
    code: int,
) -> None:
    more = side.data() if key == "refused" else b""
    ended, [answer] = run(monkeypatch, capsys, bad + more, "keep")
    assert (ended, list(answer)) == (code, [key])
    assert side.unplaced()


def test_tree_is_prebuilt_for_the_next_run(
    side: Side, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prebuilt_tree, "LEAST", 1)
    monkeypatch.setattr(server, "run_detached", lambda act: act())
    name = "0" * 32
    ahead = side.objects / "spare" / name / "tree"
    run(monkeypatch, capsys, side.data(spare=name))
    assert (ahead / "train.py").read_bytes() == CODE
    inode = ahead.stat().st_ino
    run(monkeypatch, capsys, side.data(spare=name, run_dir=f"{side.folder}/runs/b"))
    assert (side.folder / "runs/b/code").stat().st_ino == inode  # it was moved, not made
    assert (side.folder / "runs/b/code/lib/tool").read_bytes() == TOOL
