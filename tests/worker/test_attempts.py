"""The ledger of a run's attempts: the events file, the history and the progress of training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import attempts
from dtslurm.worker.supervisor.attempts import AttemptEnd, Ledger


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(attempts, "time", SimpleNamespace(time=lambda: 1000.12345))
    monkeypatch.delenv("DTSLURM_CHECKPOINT_DIR", raising=False)
    return Ledger(str(tmp_path))


def read_events(ledger: Ledger) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(ledger.events_path).read_text().splitlines()]


def write_steps(ledger: Ledger, attempt: int, *records: object) -> None:
    folder = Path(ledger.run_dir) / "metrics" / str(attempt)
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_event_has_its_time_and_its_attempt(ledger: Ledger) -> None:
    ledger.event("attempt", 0, world_size=2)
    ledger.event("requeue")
    assert read_events(ledger) == [
        {"time": 1000.123, "event": "attempt", "attempt": 0, "world_size": 2},
        {"time": 1000.123, "event": "requeue"},
    ]
    assert Path(ledger.events_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ('{"event": "a"}\n', '{"event": "a"}\n'),
        ('{"event": "a', '{"event": "a\n'),
        ("\0\0", "\0\0\n"),  # as a file server may leave them after a crash
    ],
)
def test_event_begins_on_a_line_of_its_own(ledger: Ledger, before: str, after: str) -> None:
    Path(ledger.events_path).write_text(before)
    ledger.event("ended")
    assert Path(ledger.events_path).read_text() == after + '{"time": 1000.123, "event": "ended"}\n'


@pytest.mark.parametrize(("missing", "is_error"), [(0, False), (1, True), (5, True)])
def test_event_that_is_cut_off_counts_as_a_full_disk(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, missing: int, is_error: bool
) -> None:
    monkeypatch.setattr(os, "write", lambda _descriptor, line: len(line) - missing)
    if is_error:
        with pytest.raises(OSError, match="No space left on device"):
            ledger._append(b"{}\n")
    else:
        ledger._append(b"{}\n")


@pytest.mark.parametrize(
    ("folders", "number"), [([], 0), (["0"], 1), (["0", "7"], 8), (["5", "2"], 6), (["x", "-3"], 0)]
)
def test_new_attempt_has_the_next_number(ledger: Ledger, folders: list[str], number: int) -> None:
    for name in folders:
        (Path(ledger.run_dir) / "logs" / name).mkdir(parents=True)
    assert ledger.begin() == number
    assert (Path(ledger.run_dir) / "logs" / str(number)).is_dir()


def test_attempt_number_that_another_supervisor_takes_meanwhile_is_skipped(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0", "1", "2"):
        (Path(ledger.run_dir) / "logs" / name).mkdir(parents=True)
    monkeypatch.setattr(attempts, "names_in", lambda _folder: ["0"])
    assert ledger.begin() == 3


def test_history_contains_the_details_of_each_end(ledger: Ledger) -> None:
    ledger.event("attempt_ended")
    ledger.event(
        "attempt_ended", 1, exit_code=137, cause="killed", blame="site", rank=3, node="n2", summary="gone",
        progressed=False,
    )  # fmt: skip
    ledger.event("decision", 1, counted=True)
    ledger.event("attempt_ended", 2, exit_code=None, cause="lost", blame="node")
    ledger.event("decision", 2, counted=False)
    assert ledger.history() == [
        AttemptEnd(0, 0, "unknown", "unknown"),
        AttemptEnd(1, 137, "killed", "site", 3, "n2", "gone", "", False, True),
        AttemptEnd(2, 0, "lost", "node"),
    ]


def test_attempts_without_an_end_are_recorded_as_lost(ledger: Ledger) -> None:
    for number in (0, 1, 2):
        ledger.event("attempt", number)
    ledger.event("attempt")
    ledger.event("attempt_ended", 1, cause="killed")
    write_steps(ledger, 2, {"step": 8})
    ledger.close_open()
    lost = ledger.events("attempt_ended")[1:]
    assert [(end["attempt"], end["step"], end["progressed"]) for end in lost] == [
        (0, None, None),
        (2, 8, True),
    ]
    assert {(end["exit_code"], end["cause"], end["blame"]) for end in lost} == {(None, "lost", "node")}
    assert lost[0]["summary"] == (
        "the job ended without a record: the first node was lost, or Slurm started the job again"
    )
    ledger.close_open()
    assert len(ledger.events("attempt_ended")) == 3


@pytest.mark.parametrize(
    ("events", "result"),
    [
        ([], (None, 0)),
        ([("attempt", 0, {"world_size": 8})], (0, 8)),
        ([("attempt", 0, {})], (0, 0)),
        ([("attempt", 0, {"world_size": 8}), ("attempt", 1, {"world_size": 4})], (1, 4)),
        ([("attempt", 0, {"world_size": 8}), ("hang", 0, {})], (0, 8)),
        ([("attempt", 0, {"world_size": 8}), ("agent_restarted", 0, {})], (0, 8)),
        ([("attempt", 0, {"world_size": 8}), ("attempt_ended", 0, {})], (None, 8)),
        ([("attempt", 0, {"world_size": 8}), ("requeue", None, {})], (None, 8)),
        ([("attempt", None, {"world_size": 8})], (None, 0)),
    ],
)
def test_open_attempt_is_the_last_one_without_an_end_or_a_requeue(
    ledger: Ledger, events: list[tuple[str, int | None, dict[str, Any]]], result: tuple[int | None, int]
) -> None:
    for name, number, values in events:
        ledger.event(name, number, **values)
    assert ledger.left_open() == result


def test_excluded_nodes_are_listed_once_in_order(ledger: Ledger) -> None:
    for node in ("n2", "n1", "", "n2"):
        ledger.event("node_excluded", node=node)
    ledger.event("health", node="n3")
    assert ledger.excluded() == ["n2", "n1"]


def test_time_since_the_first_start_is_by_the_controllers_clock(ledger: Ledger) -> None:
    assert ledger.seconds_since_first_start(5000.0) == 0.0
    ledger.event("attempt", 0)
    assert ledger.seconds_since_first_start(1100.123) == pytest.approx(100.0)
    assert ledger.seconds_since_first_start(900.0) == 0.0
    ledger.event("attempt", 1, slurm_time=600.0)
    ledger.event("attempt", 2, slurm_time=800.0)
    assert ledger.seconds_since_first_start(1100.0) == 500.0


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ([], None),
        ([{"step": 3}, {"step": 9}, {"step": 4}], 9),
        ([{"step": "many"}, {"loss": 1.0}], None),
        ([{"step": 0}, {"step": None}], 0),
    ],
)
def test_step_of_an_attempt_is_its_highest_step(ledger: Ledger, records: list[Any], step: int | None) -> None:
    write_steps(ledger, 4, *records)
    assert ledger.step_of(4) == step


@pytest.mark.parametrize(
    ("steps", "progressed"),
    [
        ([0], True),
        ([5, 5], False),
        ([5, 6], True),
        ([6, 5], False),
        ([9, 5, 7], False),
        ([5, 9, 7], False),
        ([None, 5], True),
        ([5, None, 6], True),
        ([0, 0], False),
    ],
)
def test_attempt_progressed_if_it_reached_a_higher_step_than_all_earlier_attempts(
    ledger: Ledger, steps: list[int | None], progressed: bool
) -> None:
    for attempt, step in enumerate([*steps, 99]):  # later attempts do not count
        write_steps(ledger, attempt, *([] if step is None else [{"step": step}]))
    assert ledger.progressed(len(steps) - 1) is progressed


@pytest.mark.parametrize(
    ("attempts", "progressed"),
    [
        ([range(1, 100), range(1, 103)], False),  # the second attempt was only faster
        ([range(1, 100), range(1, 300)], True),
        ([range(1, 100), range(91, 103)], True),  # from a checkpoint
        ([range(1, 100), [], range(1, 103)], False),
        ([range(1, 100), [0, *range(91, 150)]], True),  # one record before the checkpoint was loaded
        ([range(91, 103), range(1, 104)], False),
    ],
)
def test_attempt_that_repeats_the_steps_of_the_attempt_before_made_no_progress(
    ledger: Ledger, attempts: list[Any], progressed: bool
) -> None:
    for attempt, steps in enumerate(attempts):
        write_steps(ledger, attempt, *({"step": step} for step in steps))
    assert ledger.progressed(len(attempts) - 1) is progressed
    assert bool(ledger.warn_of_repetition(len(attempts) - 1)) is not progressed


def test_steps_that_begin_again_in_each_epoch_are_compared_by_epoch(ledger: Ledger) -> None:
    for attempt in range(3):
        write_steps(ledger, attempt, *({"epoch": min(attempt, 1), "step": step} for step in range(50)))
    assert [ledger.progressed(attempt) for attempt in range(3)] == [True, True, False]


def test_repetition_is_reported_with_its_evidence(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.warn_of_repetition(0).startswith(
        "it is unknown whether training progresses from job to job"
    )
    (tmp_path / "checkpoints").mkdir()
    for attempt in range(3):
        ledger.note_checkpoints(attempt)
        write_steps(ledger, attempt, *({"step": step} for step in range(1, 100 + attempt)))
    assert ledger.warn_of_repetition(0) == ""
    text = "attempt 2 began again at step 1, as attempt 1 did, "
    assert ledger.warn_of_repetition(2).startswith(
        text + "and $DTSLURM_CHECKPOINT_DIR contains nothing new: "
    )
    assert ledger.progressed(2) is False
    (tmp_path / "checkpoints/step-90").touch()
    assert ledger.warn_of_repetition(2).startswith(text + "although $DTSLURM_CHECKPOINT_DIR contains check")
    assert ledger.progressed(2) is True


def test_checkpoints_of_the_configured_folder_show_progress(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTSLURM_CHECKPOINT_DIR", str(tmp_path / "elsewhere"))
    for folder in ("elsewhere", "checkpoints"):
        (tmp_path / folder).mkdir()
    (tmp_path / "elsewhere/step-1").touch()
    os.utime(tmp_path / "elsewhere/step-1", (1000, 1000))
    (tmp_path / "elsewhere/broken").symlink_to("nowhere")
    ledger.note_checkpoints(1)
    assert json.loads((tmp_path / "ranks/1/checkpoints.json").read_text()) == {
        "changed": {"step-1": 1_000_000_000_000}
    }
    (tmp_path / "checkpoints/step-2").touch()
    assert ledger.progressed(1) is False
    (tmp_path / "elsewhere/step-2").touch()
    assert ledger.progressed(1) is True


def test_progress_is_unknown_without_a_record_of_the_checkpoints_at_the_beginning(
    ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-1").touch()
    assert ledger.progressed(0) is None
    (tmp_path / "ranks").write_text("not a folder")
    ledger.note_checkpoints(0)
    assert ledger.progressed(0) is None
