"""``dtslurm logs`` on jobs that wait, run, are requeued, end and are deleted; on a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import WITHOUT_SSH, Cli


def following(cli: Cli, job: str, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "dtslurm", "logs", "-f", *words, job]
    env = {**os.environ, **cli.env}
    return subprocess.Popen(
        argv, cwd=cli.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def on_a_terminal(cli: Cli, *words: str) -> str:
    """Run dtslurm with a terminal as its output; return what it wrote there."""
    master, slave = pty.openpty()
    env = {**os.environ, **cli.env, "TERM": "xterm-256color", "COLUMNS": "200"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "dtslurm", *words],
        cwd=cli.folder,
        env=env,
        stdout=slave,
        stderr=subprocess.DEVNULL,
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 65536):
            written += chunk
    except OSError:  # EIO: nobody has the other end any more
        pass
    os.close(master)
    assert process.wait(timeout=600) == 0
    return written.decode("utf-8", "replace")


def test_logs_follow_begins_before_the_job_and_continues_into_the_next_attempt(cli: Cli) -> None:
    first = cli.submit(cli.script("import time; time.sleep(2)", "first.py"))
    script = cli.script(
        """
        import os, time
        attempt = os.environ["DTSLURM_ATTEMPT"]
        print("begin", attempt, flush=True)
        if attempt == "0":
            time.sleep(100)
        print("end", attempt, end="")
        """
    )
    job = cli.submit("--requeue", "-d", f"afterany:{first}", script)
    ranks = []
    with following(cli, job) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            ranks += [line.rstrip("\n")] if line.startswith("[0]") else []
            if line == "[0] begin 0\n":
                cli("requeue", job)
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert ranks == ["[0] begin 0", "[0] begin 1", "[0] end 1"]
    assert "attempt 1 begins" in err


def test_logs_of_an_ended_job_are_complete_also_when_followed(cli: Cli) -> None:
    job = cli.submit(
        "-l", "srun", "--ntasks-per-node", "2", cli.script("for i in range(3000): print('line', i)")
    )
    cli.wait_for_end(job)
    wanted = [f"[{rank}] line {number}" for rank in range(2) for number in range(3000)]
    assert cli("logs", job, "--no-fold").stdout.splitlines()[-6000:] == wanted
    out, _ = following(cli, job, "--rank", "1").communicate(timeout=600)
    assert out.splitlines() == wanted[3000:]
    assert cli("logs", job, "--fold", "--grep", "line 2999").stdout == "[0-1] line 2999\n"
    document = json.loads(cli("logs", job, "--json", "--rank", "0", "-n", "2").stdout)
    assert [line["text"] for line in document["lines"]] == ["line 2998", "line 2999"]


def test_tail_of_a_log_with_a_gigabyte_line_is_short(cli: Cli) -> None:
    script = cli.script(
        """
        import os
        print("begin", flush=True)
        os.ftruncate(1, 1 << 30)  # one line of a gigabyte that takes no space on the disk
        print("end", flush=True)
        """
    )
    job = cli.submit(script)
    cli.wait_for_end(job)
    assert (cli.run_dir(job).logs(0) / "rank-0.log").stat().st_size > 1 << 30
    shown = cli("logs", job, "--rank", "0", "--tail", "5", timeout=120).stdout
    assert shown.endswith("end\n")
    assert len(shown) < 6 << 16
    assert len(following(cli, job, "--rank", "0", "--tail", "5").communicate(timeout=120)[0]) < 6 << 16


@WITHOUT_SSH
def test_logs_are_selected_by_time(cli: Cli) -> None:
    script = cli.script(
        """
        print("2020-01-01 10:00:00,000 early")
        print("no time of its own")
        print("2020-01-01 12:00:00,000 late")
        """
    )
    job = cli.submit(script)
    cli.wait_for_end(job)
    cli.env["TZ"] = "America/New_York"  # both clocks are this machine's
    words = ("--rank", "0", "--until", "2020-01-01 11:00")
    assert cli("logs", job, *words).stdout.splitlines()[1:] == ["[0] no time of its own"]
    assert cli("logs", job, "--rank", "0", "--since", "2020-01-01 11:00").stdout.count("\n") == 1
    assert "is not a time" in cli("logs", job, "--since", "soon", code=2).stderr


def test_c1_terminal_output_has_folded_lines_and_no_control_sequences(cli: Cli) -> None:
    script = cli.script(
        """
        import os
        print("ready")
        print("\\x1b]52;c;Zm9v\\x07\\x1b[2J\\x1b[31mred of", os.environ["RANK"])
        print(" 1%|\\r50%|\\r99%|")
        print("[/usr/bin/x] [bold]")
        """
    )
    job = cli.submit("-l", "srun", "--ntasks-per-node", "2", script)
    cli.wait_for_end(job)
    for words in (["logs", "--rank", "0-1", job], ["logs", "-f", "--rank", "0-1", job]):
        text = on_a_terminal(cli, *words)
        assert "\x1b[1m[0-1]\x1b[0m ready" in text
        assert text.count("ready") == 1
        assert "99%|" in text
        assert "50%|" not in text
        assert "[/usr/bin/x] [bold]" in text
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert all(f"red of {rank}" in text for rank in range(2))
    assert "\x1b[31mred of 1" in on_a_terminal(cli, "logs", "--rank", "1", job)


@pytest.mark.parametrize("words", [(), ("-f",)])
def test_logs_of_a_run_with_deleted_log_files_are_empty(cli: Cli, words: tuple[str, ...]) -> None:
    job = cli.submit(cli.script("print('x')"))
    cli.wait_for_end(job)
    run = cli.run_dir(job)
    for path in sorted((run.path / "logs").rglob("*.log")):
        Path(path).unlink()
    assert cli("logs", *words, job).stdout == ""
