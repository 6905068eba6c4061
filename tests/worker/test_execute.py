"""The program that runs a command in the place of a process of a job."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.probe import execute as program
from dtslurm.worker.probe.execute import Spool
from dtslurm.worker.stacks import stacks
from tests.conftest import skip_or_fail
from tests.processes import ends_in_time
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from dtslurm.worker.probe import execute; sys.exit(execute.main())"
RUN_DIR = f"/runs/{os.getpid()}"  # no process of another test is of this run
RUN = {"DTSLURM_RUN_DIR": RUN_DIR, "SLURM_PROCID": "0", "PATH": os.environ["PATH"]}


@contextmanager
def process_of_a_job(
    tmp_path: Path, prefix: Sequence[str] = (), setup: str = "", **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start what a rank could be; it has begun when this enters."""
    line = f"{setup} : >{shlex.quote(str(tmp_path))}/began; exec sleep 1000"
    argv = [*prefix, "sh", "-c", line]
    with subprocess.Popen(argv, env={**RUN, **env}, cwd=tmp_path) as process:
        try:
            wait_until((tmp_path / "began").exists)
            yield process
        finally:
            process.kill()


def execute(
    command: Sequence[str],
    *,
    pid: int | None,
    run_dir: str = f"/home/user{RUN_DIR}",  # under another path here
    has_input: bool = False,
    **variables: str,
) -> subprocess.Popen[str]:
    """Start the program as srun does."""
    process = {"label": "3", "node": "n1", "variables": variables or {"RANK": "3"}, "pid": pid}
    request = {
        "run_dir": run_dir,
        "by_node": False,
        "processes": [process],
        "command": list(command),
        "with_labels": False,
        "has_input": has_input,
    }
    argument = base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, argument],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(program: subprocess.Popen[str]) -> tuple[str, str, int]:
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        return program.stdout.read(), program.stderr.read(), program.wait()


class SlowFile(io.FileIO):
    """A file whose bytes can be read for a while before the write that brought them returns."""

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        time.sleep(0.05)
        return written


def test_bytes_that_are_read_before_they_are_counted_do_not_end_the_input(tmp_path: Path) -> None:
    with SlowFile(tmp_path / "spool", "w+") as file:
        spool = Spool(file)
        source, target = os.pipe()
        copy = threading.Thread(target=spool.copy_to, args=(os.fdopen(target, "wb"),))
        copy.start()
        for _ in range(5):
            spool.append(b"a line\n")
        spool.close()
        with os.fdopen(source, "rb") as pipe:
            assert pipe.read() == b"a line\n" * 5
        copy.join()


def test_each_process_gets_the_whole_input_also_beside_one_that_has_ended(tmp_path: Path) -> None:
    data = os.urandom((3 << 16) + 5)
    with (tmp_path / "spool").open("w+b", buffering=0) as file:
        spool = Spool(file)
        spool.append(data[:9])
        pipes = [os.pipe() for _ in range(3)]
        os.close(pipes[0][0])  # the end of this process's input
        copies = [
            threading.Thread(target=spool.copy_to, args=(os.fdopen(target, "wb"),)) for _, target in pipes
        ]
        for copy in copies:
            copy.start()
        spool.append(data[9:])
        spool.close()
        for source, _ in pipes[1:]:
            with os.fdopen(source, "rb") as pipe:
                assert pipe.read() == data
        for copy in copies:
            copy.join()


def test_command_gets_environment_and_folder_of_the_recorded_process(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3", COLOUR="dark blue") as rank:
        text, _, code = output_of(execute(["sh", "-c", "echo $COLOUR; pwd -P; exit 7"], pid=rank.pid))
    assert (text, code) == (f"dark blue\n{tmp_path.resolve()}\n", 7)


@pytest.mark.parametrize("pid", [None, 1, 2**22 + 1])
def test_process_is_found_if_its_recorded_id_is_that_of_another(tmp_path: Path, pid: int | None) -> None:
    own = {"DTSLURM_ROLE": "judge", "DTSLURM_ROLE_INSTANCE": str(os.getpid())}
    with process_of_a_job(tmp_path, **own):
        assert (
            output_of(execute(["printenv", "DTSLURM_ROLE"], pid=pid, has_input=False, **own))[0] == "judge\n"
        )


def test_process_of_another_run_or_rank_is_never_taken(tmp_path: Path) -> None:
    name = f"other-{os.getpid()}"
    with process_of_a_job(tmp_path, RANK="3", DTSLURM_RUN_DIR=f"/runs/{name}") as rank:
        _, errors, code = output_of(execute(["true"], pid=rank.pid, RANK="3", COLOUR=name))
    assert (errors, code) == ("dtslurm: 3 no longer runs\n", 3)


def test_command_ends_when_the_input_ends(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        program = execute(["sh", "-c", "echo $$; exec sleep 1000"], pid=rank.pid)
        assert program.stdout is not None
        assert program.stdin is not None
        pid = int(program.stdout.readline())
        program.stdin.close()
        assert ends_in_time(pid)
        assert output_of(program)[2] == 128 + 15


def send(program: subprocess.Popen[str], *lines: bytes) -> None:
    assert program.stdin is not None
    program.stdin.write("".join(base64.b64encode(line).decode() + "\n" for line in lines))
    program.stdin.flush()


def test_command_reads_the_input_to_its_end(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        program = execute(["sh", "-c", "read line; echo got $line; cat"], pid=rank.pid, has_input=True)
        assert program.stdout is not None
        send(program, b"a line\n")
        assert program.stdout.readline() == "got a line\n"
        send(program, b"two\nli", b"nes\n", b"")
        assert output_of(program) == ("two\nlines\n", "", 0)


def test_command_without_an_input_reads_nothing(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        program = execute(["cat"], pid=rank.pid)
        send(program, b"a line\n", b"")
        assert output_of(program) == ("", "", 0)


def test_command_that_does_not_read_its_input_ends_with_the_caller(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        program = execute(["sh", "-c", "echo $$; exec sleep 1000"], pid=rank.pid, has_input=True)
        assert program.stdout is not None
        assert program.stdin is not None
        pid = int(program.stdout.readline())
        for _ in range(40):  # more than pipes hold
            send(program, bytes(1 << 15))
        program.stdin.close()
        assert ends_in_time(pid)
        assert output_of(program)[2] == 128 + 15


def test_command_that_ends_before_its_input_is_no_error(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        program = execute(["true"], pid=rank.pid, has_input=True)
        send(program, b"never read", b"")
        assert output_of(program) == ("", "", 0)


def test_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3") as rank:
        _, errors, code = output_of(execute(["no-such-program"], pid=rank.pid))
    assert (errors, code) == ("dtslurm: no-such-program: No such file or directory\n", 127)


def test_task_of_another_array_is_never_taken(tmp_path: Path) -> None:
    with process_of_a_job(tmp_path, RANK="3", DTSLURM_RUN_DIR=f"/runs/{tmp_path.name}/tasks/5"):
        for name, code in ((tmp_path.name, 0), ("another", 3)):
            assert (
                output_of(execute(["true"], pid=None, run_dir=f"/home/user/runs/{name}/tasks/5"))[2] == code
            )


def test_command_runs_in_a_folder_that_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with process_of_a_job(tmp_path, setup="cd scratch && rmdir ../scratch &&", RANK="3") as rank:
        text, errors, code = output_of(execute(["printenv", "RANK"], pid=rank.pid))
    assert (text, errors, code) == ("3\n", "", 0)


NAMESPACES = {
    "as the user": ["unshare", "--user", "--map-root-user", "--mount"],
    "as root": ["unshare", "--mount"],
}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_command_enters_the_container_of_the_process(tmp_path: Path, kind: str) -> None:
    prefix = NAMESPACES[kind]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        skip_or_fail("permission to create namespaces")
    (tmp_path / "inside").mkdir()
    setup = "mount -t tmpfs none inside && echo from the container >inside/file && cd inside &&"
    with process_of_a_job(tmp_path, prefix, setup, RANK="3") as rank:
        text, errors, code = output_of(execute(["cat", "file"], pid=rank.pid))
    assert (text, errors, code) == ("from the container\n", "", 0)
    assert not (tmp_path / "inside" / "file").exists()


# ---- Which process ----


@pytest.mark.parametrize(
    ("slurm_name", "node", "is_here"),
    [
        ("n1", "n1", True),
        ("n1.site.org", "n1", True),
        ("n1", "n1.site.org", True),
        ("n1", "n11", False),
        ("n2", "n1", False),
        ("", os.uname().nodename, True),
        ("", "another-" + os.uname().nodename, False),
    ],
)
def test_node_is_known_by_its_name_without_the_domain(
    monkeypatch: pytest.MonkeyPatch, slurm_name: str, node: str, is_here: bool
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", slurm_name)
    assert program.is_here(node, by_node=True) is is_here
    assert program.is_here(node, by_node=False)


@pytest.mark.parametrize(
    ("env", "variables", "is_match"),
    [
        ({"RANK": "3"}, {"RANK": "3"}, True),
        ({"RANK": "3"}, {"RANK": "2"}, False),
        ({}, {"RANK": "0"}, True),  # launcher single exports no rank
        ({}, {"RANK": "1"}, False),
        ({"DTSLURM_ROLE": "judge"}, {"DTSLURM_ROLE": "judge", "DTSLURM_ROLE_INSTANCE": "1"}, False),
        ({"RANK": "3", "DTSLURM_RUN_DIR": "/runs/b"}, {"RANK": "3"}, False),
    ],
)
def test_environment_identifies_a_task(
    env: dict[str, str], variables: dict[str, str], is_match: bool
) -> None:
    assert program.matches({**RUN, **env}, variables, RUN_DIR) is is_match
    without_task = {name: value for name, value in RUN.items() if name != "SLURM_PROCID"}
    assert not program.matches({**without_task, **env}, variables, RUN_DIR)


def test_oldest_of_several_matching_processes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {**RUN, "RANK": "3"}
    started = {os.getpid(): 1.0, 5: 4.0, 9: 2.0, 12: 3.0, 14: 0.0}
    monkeypatch.setattr(program, "environment_of", lambda pid: RUN if pid == 14 else rank)
    monkeypatch.setattr(stacks, "started_at", started.__getitem__)
    monkeypatch.setattr(os, "listdir", lambda _folder: ["self", *map(str, started)])
    target = {"pid": None, "variables": {"RANK": "3"}}
    assert program.find_process(target, RUN_DIR) == 9
    assert program.find_process({**target, "pid": 12}, RUN_DIR) == 12  # the recorded one
    assert program.find_process({**target, "pid": 14}, RUN_DIR) == 9  # has another's id now
    assert program.find_process({**target, "variables": {"RANK": "4"}}, RUN_DIR) is None


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of processes: this one, and 7 in the same namespaces."""
    for name in ("self", "7"):
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "root").symlink_to("/")
        for kind in ("mnt", "user"):
            (tmp_path / name / "ns" / kind).symlink_to(f"{kind}:[1]")
    monkeypatch.setattr(program, "PROC", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return tmp_path


def move(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


NSENTER = ["/bin/nsenter", "--target", "7", "--mount", "--root", "--wd"]
AS_USER = ["--user", "--preserve-credentials"]


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ({}, []),
        ({"ns/mnt": "mnt:[2]"}, [*NSENTER, "--"]),
        ({"ns/user": "user:[2]"}, [*NSENTER, *AS_USER, "--"]),
        ({"ns/mnt": "mnt:[2]", "ns/user": "user:[2]"}, [*NSENTER, *AS_USER, "--"]),
        ({"root": "/usr"}, [*NSENTER, "--"]),
    ],
)
def test_container_of_a_process_is_entered_as_far_as_it_differs(
    proc: Path, moved: dict[str, str], words: list[str]
) -> None:
    for name, target in moved.items():
        move(proc / "7" / name, target)
    folder = "/" if moved else str(proc / "7/cwd")
    assert program.find_way(7, ["cat", "file"]) == ([*words, "cat", "file"], folder)


def test_node_that_cannot_enter_containers_is_an_error(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert program.find_way(7, ["true"])[0] == ["true"]
    move(proc / "7/ns/mnt", "mnt:[2]")
    with pytest.raises(OSError, match="this node has no nsenter"):
        program.find_way(7, ["true"])


@pytest.mark.parametrize(("terminal", "result"), [("xterm", "xterm"), (None, "dumb")])
def test_shell_has_the_environment_of_the_process_and_the_terminal_of_the_caller(
    proc: Path, monkeypatch: pytest.MonkeyPatch, terminal: str | None, result: str
) -> None:
    began: list[Any] = []
    monkeypatch.delenv("TERM", raising=False)
    if terminal is not None:
        monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(program, "environment_of", lambda pid: {"PID": str(pid), "TERM": "of the job"})
    monkeypatch.setattr(os, "chdir", began.append)
    monkeypatch.setattr(os, "execvpe", lambda *words: began.extend(words))
    program.enter(7)
    folder, name, words, env = began
    assert (folder, name, words[0]) == (str(proc / "7/cwd"), "/bin/sh", "/bin/sh")
    assert env == {"PID": "7", "TERM": result}


# ---- What is run ----


class Request:
    """The program with a request; what it would run is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.entered: list[int] = []
        self.ran: list[tuple[list[str], list[tuple[str, int]], bool, bool]] = []
        monkeypatch.setattr(program, "find_process", lambda target, _run_dir: target["pid"])
        monkeypatch.setattr(program, "enter", self.enter)
        monkeypatch.setattr(program, "run_all", self.run_all)
        monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def enter(self, pid: int) -> int:
        self.entered.append(pid)
        return 4

    def run_all(
        self,
        command: list[str],
        targets: list[tuple[str, int]],
        *,
        with_labels: bool,
        spool: Spool | None = None,
    ) -> int:
        self.ran.append((command, targets, with_labels, spool is not None))
        if spool is not None:
            spool._file.close()  # as the end of the program does
        return 5

    def main(self, *processes: tuple[str, str, int | None], **values: Any) -> int:
        items: list[dict[str, Any]] = [
            {"label": label, "node": node, "pid": pid, "variables": {}} for label, node, pid in processes
        ]
        request: dict[str, Any] = {"run_dir": "/runs/a", "by_node": True, "processes": items,
                                   "command": ["true"], "with_labels": False, "has_input": False}  # fmt: skip
        argument = base64.b64encode(zlib.compress(json.dumps({**request, **values}).encode())).decode()
        self.monkeypatch.setattr(sys, "argv", ["execute", argument])
        return program.main()


@pytest.fixture
def request_of(monkeypatch: pytest.MonkeyPatch) -> Request:
    return Request(monkeypatch)


def test_command_runs_for_the_processes_of_this_node(request_of: Request) -> None:
    processes = [("0", "n1", 10), ("1", "n1", 11), ("2", "n2", 12)]
    assert request_of.main(*processes, with_labels=True) == 5
    assert request_of.main(*processes[:1], has_input=True) == 5
    assert request_of.main(*processes, by_node=False) == 5
    assert request_of.ran == [
        (["true"], [("0", 10), ("1", 11)], True, False),
        (["true"], [("0", 10)], False, True),
        (["true"], [("0", 10), ("1", 11), ("2", 12)], False, False),
    ]
    assert request_of.main(*processes, command=[]) == 4
    assert request_of.entered == [10]


def test_command_runs_for_no_process_if_one_has_ended(
    request_of: Request, capsys: pytest.CaptureFixture[str]
) -> None:
    assert request_of.main(("0", "n1", None), ("1", "n1", 11), ("2", "n1", None)) == 3
    assert capsys.readouterr().err == "dtslurm: 0, 2 no longer runs\n"
    assert request_of.main(("0", "n2", 10)) == 3
    assert capsys.readouterr().err == "dtslurm: this part no longer runs\n"
    assert request_of.ran == []


def run_here(monkeypatch: pytest.MonkeyPatch, *command: str, labels: Sequence[str] = ("0",)) -> int:
    """Run a command in the place of this process, with an input that does not end."""
    monkeypatch.setattr(program, "read_input", lambda _processes, _spool: None)
    targets = [(label, os.getpid()) for label in labels]
    return program.run_all(list(command), targets, with_labels=True)


def test_each_line_has_the_label_of_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "echo $DTSLURM_PID; echo; printf 'no end'; echo problem >&2"
    processes: list[subprocess.Popen[bytes]] = []
    original = program.start

    def start(*words: Any, **values: Any) -> subprocess.Popen[bytes]:
        processes.append(original(*words, **values))
        return processes[-1]

    monkeypatch.setattr(program, "start", start)
    assert run_here(monkeypatch, "sh", "-c", words, labels=("0", "judge")) == 0
    for process in processes:
        process.communicate()  # closes the pipes, as the end of the program does
    said = capsys.readouterr()
    for label in ("0", "judge"):
        prefix = f"[{label}] "
        own_lines = [line for line in said.out.splitlines() if line.startswith(prefix)]
        assert own_lines == [prefix + line for line in (str(os.getpid()), "", "no end")]
    assert sorted(said.err.splitlines()) == ["[0] problem", "[judge] problem"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 5, 3], 5), ([0, -9], 128 + 9), ([-15, 1], 128 + 15), ([1, -9], 128 + 9)],
)
def test_highest_code_is_returned_as_srun_does_for_the_nodes(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], code: int
) -> None:
    left = iter(codes)

    def start(*_: object, **__: object) -> Any:
        own = next(left)
        return SimpleNamespace(stdout=None, stderr=None, wait=lambda: own)

    monkeypatch.setattr(program, "start", start)
    assert run_here(monkeypatch, "true", labels=[str(rank) for rank in range(len(codes))]) == code


@pytest.mark.parametrize(("is_there", "code"), [(True, 126), (False, 127)])
def test_command_that_cannot_be_run_has_the_code_of_a_shell(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_there: bool,
    code: int,
) -> None:
    path = tmp_path / "command"
    if is_there:
        path.touch(0o600)
    assert run_here(monkeypatch, str(path)) == code
    reason = "Permission denied" if is_there else "No such file or directory"
    assert capsys.readouterr().err == f"dtslurm: {path}: {reason}\n"


def test_command_that_starts_for_some_processes_only_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as first:
        started = [first]

        def start(*_: object, **__: object) -> Any:
            if not started:
                raise OSError("this node has no nsenter")
            return started.pop()

        monkeypatch.setattr(program, "start", start)
        assert run_here(monkeypatch, "cat", labels=("0", "1")) == 126
        assert first.poll() == -signal.SIGTERM
    assert capsys.readouterr().err == "dtslurm: cat: this node has no nsenter\n"


@pytest.mark.parametrize(
    ("setup", "number"), [("", signal.SIGTERM), ("trap '' TERM;", signal.SIGKILL)], ids=["usual", "stubborn"]
)
def test_command_ends_with_its_children(monkeypatch: pytest.MonkeyPatch, setup: str, number: int) -> None:
    monkeypatch.setattr(program, "GRACE_S", 0.05 if setup else 60.0)
    words = ["sh", "-c", f"{setup} sleep 1000 & echo $!; wait; sleep 1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        program.end([process])
        assert process.wait(60) == -number
        assert ends_in_time(child)


def test_command_has_time_to_end_also_beside_one_that_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "GRACE_S", 60.0)

    def wait(patience: float) -> int:
        raise subprocess.TimeoutExpired("command", patience)

    other = SimpleNamespace(pid=2**22 + 1, poll=lambda: None, wait=wait)  # as if the kernel did not end it
    words = ["sh", "-c", "trap 'sleep 0.05; exit 5' TERM; echo; while :; do sleep 0.01; done"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            program.end([other, process])
            assert process.poll() == 5
        finally:
            process.kill()


class Input:
    """The input of a command, as the program keeps it: data, and None for its end."""

    def __init__(self) -> None:
        self.kept: list[bytes | None] = []

    def append(self, data: bytes) -> None:
        if data == b"too much":
            raise OSError(28, "No space left on device")
        self.kept.append(data)

    def close(self) -> None:
        self.kept.append(None)


def read_pieces(monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], spool: Any) -> int:
    """Let the program read these pieces and then the end; return how often it ended the commands."""
    ended: list[object] = []
    left = iter([*pieces, b""])
    monkeypatch.setattr(program, "end", ended.append)
    monkeypatch.setattr(program, "os", SimpleNamespace(read=lambda _descriptor, _size: next(left)))
    program.read_input([], spool)
    return len(ended)


def test_lines_of_the_input_may_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    line, spool = base64.b64encode(b"some data"), Input()
    pieces = [line[:3], line[3:] + b"\n" + line[:5], line[5:] + b"\n\n"]
    assert read_pieces(monkeypatch, pieces, spool) == 1
    assert spool.kept == [b"some data", b"some data", None]
    assert read_pieces(monkeypatch, pieces, None) == 1


def test_input_that_cannot_be_kept_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [base64.b64encode(data) + b"\n" for data in (b"some data", b"too much", b"more data")]
    spool = Input()
    assert read_pieces(monkeypatch, lines, spool) == 1
    assert spool.kept == [b"some data"]
    assert capsys.readouterr().err == "dtslurm: cannot keep the input: No space left on device\n"
