"""The parsers of py-spy's output and of stacks that a program writes itself."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.stacks import readers, stacks

FOREVER = float("inf")


@pytest.fixture
def fake_py_spy(tmp_path: Path) -> Callable[[str], str]:
    """Makes a py-spy of some lines of shell; each look is noted."""

    def make(text: str) -> str:
        program = tmp_path / "bin" / "py-spy"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/looks\n{text}\n')
        program.chmod(0o700)
        return str(program)

    return make


def py_spy_calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "looks").read_text().splitlines()


def thread(name: str, tid: int, *functions: str) -> dict[str, object]:
    frames = [{"name": function, "filename": "/w/train.py", "line": 3} for function in functions]
    return {"thread_name": name, "os_thread_id": tid, "frames": frames}


def test_main_thread_is_listed_first(fake_py_spy: Callable[[str], str], tmp_path: Path) -> None:
    result = [thread("loader", 8, "get"), thread("MainThread", 7, "step", "main")]
    result[0]["frames"] = [{"name": "get", "short_filename": "queue.py"}]
    program = fake_py_spy(f"cat <<'END'\n{json.dumps(result)}\nEND")
    main, loader = readers.read_with_py_spy(program, 7, FOREVER)[0]
    assert (main["main"], main["tid"], [frame["function"] for frame in main["frames"]]) == (
        True, 7, ["step", "main"],
    )  # fmt: skip
    assert (loader["main"], loader["frames"]) == (
        False, [{"function": "get", "file": "queue.py", "line": 0}],
    )  # fmt: skip
    assert py_spy_calls(tmp_path) == ["dump --json --nonblocking --pid 7"]


def test_py_spy_runs_again_after_unreadable_output(fake_py_spy: Callable[[str], str], tmp_path: Path) -> None:
    result = json.dumps([thread("MainThread", 7, "step")])
    program = fake_py_spy(
        f"[ $(wc -l <{tmp_path}/looks) -gt 2 ] || {{ echo half; exit 0; }}\necho '{result}'"
    )
    threads, why = readers.read_with_py_spy(program, 7, FOREVER)
    assert (len(threads), why, len(py_spy_calls(tmp_path))) == (1, "", 3)


@pytest.mark.parametrize(
    ("text", "why", "times"),
    [
        ("echo; echo 'Error: no such process' >&2; exit 1", "exit code 1): Error: no such process", 3),
        ("exit 9", "py-spy returned no stack (exit code 9): no message", 3),
        ("echo 'Permission Denied: try sudo' >&2; exit 1", "permission denied", 1),  # a second try is no use
    ],
)
def test_reason_for_a_missing_stack_is_returned(
    fake_py_spy: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    why: str,
    times: int,
) -> None:
    monkeypatch.setattr(readers, "read", lambda *_path: "0\n")
    threads, result = readers.read_with_py_spy(fake_py_spy(text), 7, FOREVER)
    assert (threads, why in result, len(py_spy_calls(tmp_path))) == ([], True, times)


def test_denied_permission_names_the_ptrace_scope(
    fake_py_spy: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "read", lambda *_path: "1\n")
    program = fake_py_spy("echo 'Permission denied' >&2; exit 1")
    assert readers.read_with_py_spy(program, 7, FOREVER)[1].endswith("(kernel.yama.ptrace_scope = 1)")


def test_hanging_py_spy_is_ended_and_a_missing_py_spy_is_reported(
    fake_py_spy: Callable[[str], str], tmp_path: Path
) -> None:
    program = fake_py_spy("exec sleep 600")
    assert readers._run([program], 0.2) == (124, "", "it did not end within 0 s")
    assert readers.read_with_py_spy(str(tmp_path / "none"), 7, FOREVER)[1].startswith(
        "py-spy returned no stack (exit code 127)"
    )
    assert readers.read_with_py_spy(program, 7, time.monotonic())[1] == "no time was left for py-spy"


@pytest.mark.parametrize("where", ["own", "VIRTUAL_ENV", "PATH", "ours", "none"])
def test_py_spy_of_the_process_environment_has_precedence(
    fake_py_spy: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    program = fake_py_spy(":")
    folder = str(Path(program).parent)
    env = {"VIRTUAL_ENV": str(tmp_path)} if where == "VIRTUAL_ENV" else {}
    env |= {"PATH": f"relative:{folder}"} if where == "PATH" else {}
    monkeypatch.setattr(readers, "environment_of", lambda _pid: env)
    command = f"{folder}/python\0train.py\0" if where == "own" else "python\0"
    monkeypatch.setattr(readers, "read", lambda *_path: command)
    monkeypatch.setenv("PATH", folder if where == "ours" else "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert readers.py_spy(7) == (None if where == "none" else program)


WRITTEN = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/queue.py", line 171 in get
step 12 loss 0.5
  File "/w/train.py", line ??? in load

Current thread 0x00007f02 (most recent call first):
  File "/w/train.py", line 9 in <module>
"""


def test_written_stacks_are_parsed_among_other_lines() -> None:
    first, second = readers._written_threads(["step 11", *WRITTEN.splitlines()])
    assert [(frame["function"], frame["line"]) for frame in first["frames"]] == [("get", 171), ("load", 0)]
    assert [frame["line"] for frame in second["frames"]] == [9]
    assert list(readers._written_threads(["step 11"])) == []


def stack(tid: int, name: str, *functions: str, main: bool = False) -> dict[str, Any]:
    frames = [{"function": function, "file": "/w/train.py", "line": 3} for function in functions]
    return {"tid": tid, "name": name, "main": main, "frames": frames}


def process(*tids: int) -> dict[str, Any]:
    threads = [
        {"tid": tid, "name": f"t{tid}", "state": "S", "cpu": 0.0, "waits": "", "frames": []} for tid in tids
    ]
    return {"pid": 7, "state": "S", "cpu": 0.5, "moved": None, "by": "proc", "why": [], "threads": threads}


def test_stacks_are_added_to_the_threads_of_their_process() -> None:
    result = process(7, 8, 9)
    result["moved"] = True
    threads = [stack(9, "loader", "get"), stack(0, "", "step", main=True), stack(0, "lost", "wait")]
    stacks._add_stacks(result, ("signal", threads, []), None)
    assert (result["by"], result["moved"]) == ("signal", True)
    assert [(item["tid"], item["name"], len(item["frames"])) for item in result["threads"]] == [
        (7, "t7", 1), (9, "loader", 1), (-2, "lost", 1), (8, "t8", 0),
    ]  # fmt: skip
    stacks._add_stacks(result, ("py-spy", [], []), False)
    assert (result["by"], result["moved"]) == ("signal", True)
    stacks._add_stacks(result, ("py-spy", threads, []), False)
    assert (result["by"], result["moved"]) == ("py-spy", False)


def test_main_thread_is_the_first_unless_another_is_marked() -> None:
    first, main = stack(9, "loader", "get"), stack(7, "", "step", main=True)
    assert stacks._main_frames([first, main]) == main["frames"]
    assert stacks._main_frames([first]) == first["frames"]
    assert stacks._main_frames([]) == []


def test_stacks_are_shown_as_text() -> None:
    reader = process(7, 8)
    reader.update(why=["py-spy is missing"])
    reader["threads"][0].update(frames=stack(7, "", "step", "main")["frames"], waits="read of /f")
    reader["threads"][1].update(state="?")
    gone = {**process(), "state": "", "by": "none"}
    stopped = {**process(), "state": "T"}
    assert stacks.text({7: reader, 5: gone, 6: stopped}) == (
        "process 7: sleeping, 0.5 cores busy (by proc)\n"
        "  py-spy is missing\n"
        "  thread 7 t7: sleeping, waits in read of /f\n"
        "    step (/w/train.py:3)\n"
        "    main (/w/train.py:3)\n"
        "  thread 8 t8: ?\n"
        "process 5: gone, 0.5 cores busy (by none)\n"
        "process 6: stopped, 0.5 cores busy (by proc)\n"
    )
