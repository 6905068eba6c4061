"""The exit code or signal of a rank against the errors in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.failures import Left, collective_timeout, diagnose_run

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in load
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'cache.pt'"""
IMPORT = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import flash_attn_nope
ModuleNotFoundError: No module named 'flash_attn_nope'

{}

Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    cfg['learning_rate']
KeyError: 'learning_rate'"""
CONTEXT = "During handling of the above exception, another exception occurred:"
DIRECT = "The above exception was the direct cause of the following exception:"
COMMAND = """Traceback (most recent call last):
  File "{}", line 9, in main
    subprocess.run(command, check=True)
subprocess.CalledProcessError: Command '['false']' returned non-zero exit status 1."""


@pytest.mark.parametrize(
    ("log", "code", "signal", "cause"),
    [
        (f"{TRACEBACK}\ncache is cold, going on", 137, 9, "killed"),
        (TRACEBACK, 137, 9, "killed"),
        (f"{TRACEBACK}\n" + "warm\n" * 5, 139, 11, "segfault"),
        (TRACEBACK, 139, 11, "python-exception"),
        (f"{TRACEBACK}\ngoing on without it", 4, None, "exit-code"),
        (TRACEBACK, 4, None, "python-exception"),
        (f"{TRACEBACK}\nbye", 1, None, "python-exception"),
        (TRACEBACK.rpartition("\n")[0] + "\nRuntimeError: CUDA error: out of memory", 134, 6,
         "gpu-out-of-memory"),
        (TRACEBACK.rpartition("\n")[0] + "\nRuntimeError: CUDA error: out of memory", 137, 9,
         "gpu-out-of-memory"),
    ],
)  # fmt: skip
def test_a_caught_exception_does_not_explain_the_end_of_the_process(
    tmp_path: Path, log: str, code: int, signal: int | None, cause: str
) -> None:
    result = diagnose_run(tmp_path, Left(log, code, signal), first=(0, code))
    assert (result.cause, result.rank) == (cause, 0)


def test_a_rank_killed_last_after_an_exception_failed_by_the_exception(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, Left(TRACEBACK, 137, 9, ended=700), collective_timeout(ended=660), first=(1, 134)
    )
    assert (result.cause, result.rank) == ("python-exception", 0)


@pytest.mark.parametrize(
    ("link", "cause", "word"),
    [(CONTEXT, "python-exception", "KeyError"), (DIRECT, "import-error", "flash_attn_nope")],
)
def test_the_uncaught_exception_of_a_chain_is_reported(
    tmp_path: Path, link: str, cause: str, word: str
) -> None:
    result = diagnose_run(tmp_path, Left(IMPORT.format(link), 1))
    assert result.cause == cause
    assert word in result.summary


def test_an_out_of_memory_error_is_reported_despite_later_exceptions(tmp_path: Path) -> None:
    log = IMPORT.format(CONTEXT).replace(
        "ModuleNotFoundError: No module named 'flash_attn_nope'", "RuntimeError: CUDA error: out of memory"
    )
    assert diagnose_run(tmp_path, Left(log, 1)).cause == "gpu-out-of-memory"


@pytest.mark.parametrize(
    ("line", "code", "cause"),
    [
        ("train.py: error: the following arguments are required: --lr", 2, "bad-arguments"),
        ("Error: Invalid value for '--lr': 'x' is not a valid float.", 2, "bad-arguments"),
        ("config error: no such dataset", 1, "python-exception"),
        ("Could not override 'optimizer.lrr'.", 1, "python-exception"),
    ],
)
def test_wrong_arguments_are_blamed_on_the_user(tmp_path: Path, line: str, code: int, cause: str) -> None:
    result = diagnose_run(tmp_path, Left(line, code))
    assert (result.cause, result.blame) == (cause, "user")
    assert result.evidence[0].text == line


def test_the_last_output_line_is_quoted_if_no_error_is_recognised(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left("the data set has no split 'trian'", 1))
    assert result.cause == "exit-code"
    assert "its last output is: the data set has no split 'trian'" in result.summary


def test_a_failed_subprocess_is_an_error_of_the_rank_but_not_in_launcher_output(tmp_path: Path) -> None:
    own = diagnose_run(tmp_path / "a", Left(COMMAND.format("/home/me/prepare.py"), 1))
    assert (own.cause, own.rank) == ("python-exception", 0)
    assert "CalledProcessError" in own.summary
    text = COMMAND.format("/venv/lib/python3.11/site-packages/accelerate/commands/launch.py")
    assert diagnose_run(tmp_path / "b", Left("", 3), launchers=[text]).cause == "exit-code"
