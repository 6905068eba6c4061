"""Failures with weak, hidden or multi-line evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.failures import GLOO, Left, collective_timeout, diagnose_run, lost_connection

UNCAUGHT = """Traceback (most recent call last):
  File "/home/me/train.py", line 40, in <module>
    main()
  File "/home/me/train.py", line 9, in main
    batch["label"]
KeyError: 'label'"""
STATE_DICT = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    model.load_state_dict(saved)
  File "/x/site-packages/torch/nn/modules/module.py", line 2593, in load_state_dict
    raise RuntimeError(
RuntimeError: Error(s) in loading state_dict for GPT:
\tMissing key(s) in state_dict: "head.bias".\x20
\tsize mismatch for head.weight: copying a param with shape torch.Size([10, 8]) from checkpoint, the shape \
in current model is torch.Size([12, 8])."""
WRAPPED = """Traceback (most recent call last):
  File "/home/me/data.py", line 6, in load
    row["label"]
KeyError: 'label'

{}

Traceback (most recent call last):
  File "/home/me/train.py", line 40, in <module>
    main()
RuntimeError: training failed"""
CUT_SHORT = "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0"
CONTEXT = "During handling of the above exception, another exception occurred:"
DIRECT = "The above exception was the direct cause of the following exception:"


@pytest.mark.parametrize("signal", [15, 2, 1, 10])
@pytest.mark.parametrize("others", [GLOO, ""])
def test_a_signal_from_outside_takes_precedence_over_timeouts_of_other_ranks(
    tmp_path: Path, signal: int, others: str
) -> None:
    ended = Left("", 128 + signal, signal, ended=100)
    rest = [
        lost_connection(others or "RuntimeError: Connection closed by peer", ended=700 if others else 101)
    ] * 3
    result = diagnose_run(tmp_path, rest[0], ended, *rest[1:])
    assert (result.cause, result.rank, result.signal, result.confidence) == ("killed", 1, signal, 0.85)
    assert "which no part of the run sent" in result.summary


def test_an_interrupt_of_one_rank_is_a_kill_of_that_rank(tmp_path: Path) -> None:
    interrupted = Left("Traceback (most recent call last):\nKeyboardInterrupt", 130, 2, ended=100)
    result = diagnose_run(tmp_path, collective_timeout(ended=700), interrupted)
    assert (result.cause, result.rank) == ("killed", 1)


def test_a_signal_passed_on_by_the_launcher_is_not_the_cause(tmp_path: Path) -> None:
    ended = Left("", 143, 15, ended=100, told_to_end=True)
    result = diagnose_run(tmp_path, collective_timeout(ended=700), ended)
    assert result.cause == "collective-timeout"


def test_an_abort_after_an_exception_is_not_the_cause(tmp_path: Path) -> None:
    aborted = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 7, in <module>\n    {}["missing"]\n    ~~^^^^^^^^^^^\n'
        "KeyError: 'missing'\n"
        "terminate called without an active exception\nFatal Python error: Aborted\n\n"
        "Thread 0x00007f82a867cb80 (most recent call first):\n  <no Python frame>\n\n"
        "Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)\n"
    )
    result = diagnose_run(
        tmp_path, collective_timeout(ended=110), Left(aborted, 134, 6, ended=100), first=(1, 134)
    )
    assert (result.cause, result.rank, result.exit_code) == ("python-exception", 1, 134)


def test_a_signal_after_the_exit_code_of_another_rank_is_not_the_cause(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left("", 143, 15, ended=100), Left("", 42, ended=100), first=(1, 42))
    assert (result.cause, result.rank, result.exit_code) == ("exit-code", 1, 42)


def test_a_signal_after_timeouts_of_other_ranks_is_not_the_cause(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, collective_timeout(ended=600), collective_timeout(ended=601), Left("", 143, 15, ended=690)
    )
    assert (result.cause, result.rank) == ("collective-timeout", 2)


@pytest.mark.parametrize("line", ["heartbeat {}", "step {} loss 0.5", "WARNING: queue {} is empty"])
def test_a_traceback_before_much_output_is_the_cause_with_lower_confidence(tmp_path: Path, line: str) -> None:
    log = UNCAUGHT + "\n" + "\n".join(line.format(number) for number in range(100_000))
    result = diagnose_run(tmp_path, Left(log, 1))
    assert (result.cause, result.rank) == ("python-exception", 0)
    assert "KeyError: 'label'" in result.summary
    assert result.confidence < 0.9


@pytest.mark.parametrize(
    "line",
    [
        "Loss is inf, stopping training",
        "loss became inf",
        "FloatingPointError: Loss became infinite or NaN at iteration=12!",
        "RuntimeError: found Inf in local forward loss calculation",
        "Batch 12: Invalid loss, terminating training",
        "AssertionError: loss=inf at step 40, aborting",
    ],
)
def test_a_stop_at_an_infinite_loss_is_diagnosed_as_nan_loss(tmp_path: Path, line: str) -> None:
    assert diagnose_run(tmp_path, Left(line, 1)).cause == "nan-loss"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:598] Read error [n2]:4711: Connection reset by peer",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:40112",
        "RuntimeError: [gloo/tcp/buffer.cc:72] Timed out waiting 30000ms for send operation to complete",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:176] Try again",
    ],
)  # fmt: skip
def test_a_gloo_error_about_another_rank_is_not_the_cause(tmp_path: Path, line: str) -> None:
    result = diagnose_run(tmp_path, Left(line, 1, ended=500), Left("", 3, ended=100), first=(1, 3))
    assert (result.cause, result.rank) == ("exit-code", 1)


def test_different_tensor_sizes_in_gloo_are_a_collective_mismatch(tmp_path: Path) -> None:
    line = "RuntimeError: [enforce fail at gloo/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 20"
    result = diagnose_run(tmp_path, lost_connection(), Left(line, 1))
    assert (result.cause, result.rank) == ("collective-mismatch", 1)
    assert "40" in result.summary


@pytest.mark.parametrize(
    ("line", "code", "signal", "cause", "most"),
    [
        ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", 1, None,
         "host-out-of-memory", 0.75),
        ("MemoryError", 1, None, "host-out-of-memory", 0.75),
        ("terminate called after throwing an instance of 'std::bad_alloc'", 134, 6, "host-out-of-memory",
         0.75),
        ("", 137, 9, "killed", 0.6),
        ("Aborted (core dumped)", 134, 6, "abort", 0.75),
        ("Fatal Python error: Aborted", 134, 6, "abort", 0.75),
        ("", 134, 6, "abort", 0.75),
        ("OSError: [Errno 27] File too large", 1, None, "file-too-large", 0.95),
        (f"OSError: [Errno 27] File too large: 'x.pt'\n{CUT_SHORT}", 1, None, "file-too-large", 0.95),
        (CUT_SHORT, 1, None, "disk-full", 0.75),
    ],
)  # fmt: skip
def test_weak_evidence_gives_low_confidence(
    tmp_path: Path, line: str, code: int, signal: int | None, cause: str, most: float
) -> None:
    result = diagnose_run(tmp_path, Left(line, code, signal))
    assert result.cause == cause
    assert result.confidence <= most


def test_a_multi_line_error_message_is_quoted_completely(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left(STATE_DICT, 1))
    texts = [line.text for line in result.evidence]
    assert "RuntimeError: Error(s) in loading state_dict for GPT:" in texts
    assert any(text.strip().startswith("Missing key(s)") for text in texts)
    assert any(text.strip().startswith("size mismatch for head.weight") for text in texts)


@pytest.mark.parametrize("link", [CONTEXT, DIRECT])
def test_a_chain_of_exceptions_names_its_innermost_cause(tmp_path: Path, link: str) -> None:
    result = diagnose_run(tmp_path, Left(WRAPPED.format(link), 1))
    assert "KeyError: 'label'" in result.summary
    assert any("KeyError: 'label'" in line.text for line in result.evidence)
