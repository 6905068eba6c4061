"""The output files, labels and input of a step's tasks in the embedded scheduler."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm import srun_streams
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.srun_options import Task, plan, tasks_of
from dtslurm.worker.localslurm.srun_streams import Streams

JOB = {
    "id": 7,
    "name": "train",
    "nodes": 2,
    "ntasks": 2,
    "tasks_per_node": [1, 1],
    "cpus_per_node": [1, 1],
    "gpu_ids": [[], []],
    "array_id": None,
    "array_task": None,
    "login": {},
}


class StepStreams:
    """The streams of a step that runs in a folder, and the ends of its pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Streams] = []

    def open(self, words: str = "", tasks: int = 2) -> tuple[Streams, list[Task]]:
        job = {**JOB, "cpus_per_node": [tasks, tasks]}
        step = plan(["-n", str(tasks), "-D", str(self.folder), *words.split(), "true"], {}, job)
        streams = Streams(job, step, 3, selectors.PollSelector())
        self.opened.append(streams)
        return streams, tasks_of(step)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepStreams]:
    step = StepStreams(tmp_path)
    opened: list[int] = []
    open_file, pipe = os.open, os.pipe

    def open_and_note(*words: Any) -> int:
        opened.append(open_file(*words))
        return opened[-1]

    def pipe_and_note() -> tuple[int, int]:
        ends = pipe()
        opened.extend(ends)
        return ends

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_note)
        patch.setattr(os, "pipe", pipe_and_note)
        yield step
    for descriptor in opened:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def name_of(fd: int) -> str:
    return {1: "stdout", 2: "stderr"}.get(fd) or Path(f"/proc/self/fd/{fd}").readlink().name


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", [("stdout", "stderr"), ("stdout", "stderr")]),
        ("-o all -e all", [("stdout", "stderr"), ("stdout", "stderr")]),
        ("-o none", [("null", "null"), ("null", "null")]),
        ("-e none", [("stdout", "null"), ("stdout", "null")]),
        ("-o 1", [("null", "null"), ("stdout", "stdout")]),
        ("-o both", [("both", "both"), ("both", "both")]),
        ("-o out -e err", [("out", "err"), ("out", "err")]),
        ("-o out -e all", [("out", "out"), ("out", "out")]),
        ("-o %t.%n.%N.%s.%j.%J.%x", [("0.0.local1.3.7.7.3.train",) * 2, ("1.1.local2.3.7.7.3.train",) * 2]),
    ],
)  # fmt: skip
def test_output_of_each_task_goes_to_the_file_of_its_pattern(
    step: StepStreams, words: str, names: list[tuple[str, str]]
) -> None:
    streams, tasks = step.open(words + " -i none")
    files = [streams.files_for(task) for task in tasks]
    assert [(name_of(each.stdout), name_of(each.stderr)) for each in files] == names
    assert [name_of(each.stdin) for each in files] == ["null", "null"]


@pytest.mark.parametrize(
    ("words", "text"),
    [("", "new"),
     ("--open-mode=truncate", "new"), ("--open-mode=append", "oldnew"), ("--open-mode=a", "oldnew")],
)  # fmt: skip
def test_output_file_is_replaced_unless_append_is_given(step: StepStreams, words: str, text: str) -> None:
    (step.folder / "f").write_text("old")
    streams, tasks = step.open("-i none -o f " + words)
    os.write(streams.files_for(tasks[0]).stdout, b"new")
    assert (step.folder / "f").read_text() == text


def test_tasks_append_to_the_same_output_file(step: StepStreams) -> None:
    streams, tasks = step.open("-i none -o f")
    for task in tasks:
        os.write(streams.files_for(task).stdout, b"%d" % task.id)
    assert (step.folder / "f").read_text() == "01"


def test_output_file_that_cannot_be_opened_is_refused(step: StepStreams) -> None:
    streams, tasks = step.open("-o missing/f")
    with pytest.raises(Refused) as caught:
        streams.files_for(tasks[0])
    path = step.folder / "missing/f"
    assert caught.value.problems == [f"error: Could not open file {path}: No such file or directory"]


@pytest.mark.parametrize(
    ("words", "names"),
    [("-i none", ["null", "null"]), ("-i in.%t", ["in.0", "in.1"]), ("-i in.0", ["in.0", "in.0"])],
)
def test_input_of_each_task_is_the_file_of_its_pattern(
    step: StepStreams, words: str, names: list[str]
) -> None:
    for number in (0, 1):
        (step.folder / f"in.{number}").write_text(str(number))
    streams, tasks = step.open(words)
    assert [name_of(streams._open_input(task)) for task in tasks] == names
    assert streams.inputs == set()


def test_input_of_a_single_task_is_that_of_srun(step: StepStreams) -> None:
    streams, tasks = step.open("-i 1")
    assert name_of(streams._open_input(tasks[0])) == "null"
    assert streams._open_input(tasks[1]) == 0


def test_labels_have_the_width_of_the_largest_task_id(step: StepStreams) -> None:
    streams, tasks = step.open("-i none -l -o f", tasks=11)
    files = [streams.files_for(task) for task in tasks]
    os.write(files[2].stdout, b"a\nb\nunfin")
    os.write(files[10].stderr, b"warning\n")
    for read_end in list(streams.partial):
        streams._pump_line(read_end)  # most pipes are empty
    assert (step.folder / "f").read_text() == " 2: a\n 2: b\n10: warning\n"
    os.write(files[2].stdout, b"ished\n")
    os.write(files[10].stdout, b"no newline")
    streams.close_task_streams(files)
    streams.drain()
    added = (step.folder / "f").read_text().removeprefix(" 2: a\n 2: b\n10: warning\n")
    assert sorted(added.splitlines()) == [" 2: unfinished", "10: no newline"]
    assert (streams.partial, len(streams.selector.get_map())) == ({}, 0)


def open_inputs(
    step: StepStreams, monkeypatch: pytest.MonkeyPatch
) -> tuple[Streams, list[int], list[int], tuple[int, int]]:
    """Return streams with input, the tasks' ends and srun's ends of their pipes, and srun's own input."""
    monkeypatch.setattr(srun_streams, "_has_input", lambda: True)
    streams, tasks = step.open()
    read_ends = [streams.files_for(task).stdin for task in tasks]
    for read_end in read_ends:
        os.set_blocking(read_end, False)
    source, sink = os.pipe()
    os.set_blocking(source, False)
    streams.selector.register(source, selectors.EVENT_READ)
    return streams, read_ends, sorted(streams.inputs), (source, sink)


def test_every_task_reads_all_input(step: StepStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, read_ends, _, (source, sink) = open_inputs(step, monkeypatch)
    streams._pump_input(source)  # nothing is there yet
    assert streams.pending_input == {}
    os.write(sink, b"text")
    streams._pump_input(source)
    assert [os.read(read_end, 99) for read_end in read_ends] == [b"text", b"text"]
    assert not any(streams.pending_input.values())
    os.close(sink)
    streams._pump_input(source)
    assert [os.read(read_end, 99) for read_end in read_ends] == [b"", b""]
    assert (streams.inputs, len(streams.selector.get_map())) == (set(), 0)


def test_input_waits_for_a_task_that_does_not_read(
    step: StepStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, read_ends, write_ends, (source, sink) = open_inputs(step, monkeypatch)
    full = os.write(write_ends[0], b"x" * (1 << 20))  # as much as the pipe holds
    os.write(sink, b"first")
    streams._pump_input(source)
    os.write(sink, b"second")
    streams._pump_input(source)
    assert os.read(read_ends[1], 99) == b"first"
    assert streams.pending_input == {write_ends[0]: b"first", write_ends[1]: b""}
    assert os.read(read_ends[0], full) == b"x" * full
    streams._pump_input(source)
    streams._pump_input(source)
    assert [os.read(read_end, 99) for read_end in read_ends] == [b"firstsecond", b"second"]


def test_input_goes_on_when_a_task_has_closed_its_own(
    step: StepStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, read_ends, write_ends, (source, sink) = open_inputs(step, monkeypatch)
    os.close(read_ends[0])
    os.write(sink, b"text")
    streams._pump_input(source)
    assert os.read(read_ends[1], 99) == b"text"
    assert streams.inputs == {write_ends[1]}
    assert streams.pending_input == {write_ends[1]: b""}
