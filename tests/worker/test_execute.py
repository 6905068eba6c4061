"""The program that runs a command in the place of a process of a job."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.probe.execute import Spool
from tests.conftest import skip_or_fail
from tests.processes import ends_in_time
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from dtslurm.worker.probe import execute; sys.exit(execute.main())"
RUN = {"DTSLURM_RUN_DIR": "/runs/a", "SLURM_PROCID": "0", "PATH": os.environ["PATH"]}


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
    run_dir: str = "/home/user/runs/a",  # under another path here
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
    assert (errors, code) == ("dtslurm: 3 does not run any more\n", 3)


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
