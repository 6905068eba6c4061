"""``dtslurm exec``: commands and shells in the place of the ranks of a running job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Cli
from tests.processes import ends_in_time
from tests.waiting import busyness

pytestmark = pytest.mark.timeout(600)
WAITS = """
    import os, time
    os.makedirs("own", exist_ok=True)
    os.chdir("own")
    print("began", flush=True)
    while not os.path.exists("../stop"):
        time.sleep(0.2)
"""


@pytest.fixture
def job(cli: Cli) -> Iterator[str]:
    """A job whose two ranks wait, on two nodes of a Slurm, each in the folder ``own``."""
    layout = ["--ntasks-per-node", "2"] if cli.cluster == "local" else ["-N2"]
    words = [*layout, "-l", "srun", "--env", "COLOUR=dark blue", "--no-snapshot", "--python", sys.executable]
    job = cli.submit(*words, cli.script(WAITS))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("began") == 2)
    yield job
    (cli.folder / "stop").touch()
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"


def test_command_gets_the_place_of_its_rank_and_its_exit_code_is_returned(cli: Cli, job: str) -> None:
    lines = 'echo "$RANK, $COLOUR, ${PWD##*/}"; echo a problem >&2; exit 5'
    done = cli("exec", job, "--rank", "1", "sh", "-c", lines, code=5)
    assert (done.stdout, done.stderr) == ("1, dark blue, own\n", "a problem\n")
    assert cli("exec", "--rank=0", job, "--", "printenv", "RANK").stdout == "0\n"
    assert cli("exec", job, "cat").stdout == ""  # it has no input


def test_commands_of_all_ranks_read_the_same_input(cli: Cli, job: str) -> None:
    data = os.urandom(300_000)
    with started(
        cli, job, "-i", "--all", "sha256sum", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        out, _ = client.communicate(data, timeout=120 * busyness())
    digest = hashlib.sha256(data).hexdigest()
    assert sorted(out.decode().splitlines()) == [f"[0] {digest}  -", f"[1] {digest}  -"]
    assert client.returncode == 0


def test_lines_of_several_ranks_begin_with_their_numbers(cli: Cli, job: str) -> None:
    done = cli(
        "exec", job, "--all", "--", "sh", "-c", "echo $RANK $SLURM_NODEID; exit $((RANK ? 5 : 3))", code=5
    )
    node = 0 if cli.cluster == "local" else 1
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0", f"[1] 1 {node}"]
    assert done.stderr == ""
    assert sorted(cli("exec", job, "--rank", "0-9", "printenv", "RANK").stdout.split()) == [
        "0", "1", "[0]", "[1]",
    ]  # fmt: skip


def test_a_part_that_does_not_run_is_named(cli: Cli, job: str) -> None:
    for words, problem in {
        ("--rank", "7"): "rank 7 of job {job} is not running",
        ("--node", "nowhere"): "no rank of job {job} runs on 'nowhere'",
        ("--role", "rollout"): "job {job} has no role 'rollout'",
        ("--rank", "x"): "--rank 'x': write ranks and ranges like 0,3-7",
        ("--all", "--rank", "0"): "--rank and --all exclude each other",
    }.items():
        stderr = cli("exec", job, *words, "true", code=2).stderr
        assert problem.format(job=job) in stderr
    assert "a shell needs a terminal" in cli("exec", job, code=2).stderr
    assert "a shell runs in one place only" in cli("exec", job, "--all", code=2).stderr
    assert "no-such-program: No such file" in cli("exec", job, "no-such-program", code=127).stderr


def test_a_job_that_does_not_run_is_refused(cli: Cli) -> None:
    job = cli.submit("-l", "single", cli.script("print()"))
    cli.wait_for_end(job)
    stderr = cli("exec", job, "true", code=2).stderr
    assert f"job {job} is not running: its state is COMPLETED" in stderr


@contextlib.contextmanager
def started(cli: Cli, *words: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "dtslurm", "exec", *words]
    environment = {**os.environ, **cli.env, "TERM": "dumb"}
    with subprocess.Popen(argv, cwd=cli.folder, env=environment, **streams) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_command_ends_with_the_client(cli: Cli, job: str, number: signal.Signals) -> None:
    pid_file = cli.folder / "pid"
    command = ["sh", "-c", f"echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 1000"]
    with started(cli, job, *command) as client:
        cli.wait_until(pid_file.exists)
        process = psutil.Process(_find(int(pid_file.read_text())))
        client.send_signal(number)
        assert ends_in_time(process.pid)
        client.wait(60 * busyness())


def _find(pid: int) -> int:
    """Return the process of a command; a node of the test's Slurm has process ids of its own."""
    found = [
        item.pid for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"] == ["sleep", "1000"]
    ]
    return pid if pid in found else found[0]


def test_shell_has_a_terminal_and_the_place_of_the_rank(cli: Cli, job: str) -> None:
    ours, theirs = pty.openpty()
    with started(cli, job, "--rank", "1", stdin=theirs, stdout=theirs, stderr=theirs) as client:
        os.close(theirs)
        os.write(ours, b'test -t 0 && echo "at $RANK in ${PWD##*/}"; exit 7\n')
        text, end = b"", time.monotonic() + 60 * busyness()
        while b"at 1 in own" not in text and time.monotonic() < end:
            if select.select([ours], [], [], 1.0)[0]:
                with contextlib.suppress(OSError):  # the terminal ends with the shell
                    text += os.read(ours, 4096)
        assert b"at 1 in own" in text, text.decode()
        assert client.wait(60 * busyness()) == 7
    os.close(ours)
    assert Path(cli.folder, "own").is_dir()
