"""The evidence of a hang: the GPUs' samples, the ranks' stacks, and the activity of the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor.hangs import ActivitySummary
from dtslurm.worker.supervisor.hangs.detector import (
    FIRST_S,
    Hang,
    HangDetector,
    find_differing_rank,
    place_of,
)
from dtslurm.worker.supervisor.hangs.signals import GpuActivity, StackHistory, main_frames

NOW = 1000.0
SILENT_SINCE = 900.0
START = 3.0  # when a job begins


# ---- GPUs ----


def gpu(util: Any = 98, power_w: Any = 600.0, **more: Any) -> dict[str, Any]:
    return {"index": 0, "util": util, "power_w": power_w, **more}


def write_samples(folder: Path, *samples: tuple[float, object], node: int = 0) -> None:
    """Write a node's samples, each with its time and GPUs."""
    with (folder / f"node-{node}.jsonl").open("a") as file:
        for at, gpus in samples:
            file.write(json.dumps({"time": at, "node": f"n{node}", "gpus": gpus}) + "\n")


def at_work(folder: Path) -> bool | None:
    return GpuActivity(str(folder)).at_work(SILENT_SINCE, NOW)


@pytest.mark.parametrize(
    ("at", "works"),
    [
        (NOW, True),
        (SILENT_SINCE + 5.5, True),
        (SILENT_SINCE + 5.0, None),  # may still show the step that wrote the last output
        (SILENT_SINCE + 4.0, None),
    ],
)
def test_gpu_sample_counts_only_if_it_is_newer_than_the_last_output(
    tmp_path: Path, at: float, works: bool | None
) -> None:
    write_samples(tmp_path, (at, [gpu()]))
    assert at_work(tmp_path) is works


@pytest.mark.parametrize(("age_s", "works"), [(149.0, True), (150.0, None), (151.0, None)])
def test_gpus_are_unknown_after_their_sampler_has_stopped(
    tmp_path: Path, age_s: float, works: bool | None
) -> None:
    write_samples(tmp_path, (NOW - age_s, [gpu()]))
    assert GpuActivity(str(tmp_path)).at_work(NOW - 500.0, NOW) is works


@pytest.mark.parametrize(
    ("util", "power_w", "works"),
    [
        (5.0, 600.0, True),
        (4.9, 600.0, False),
        (0, 600.0, False),
        (98, 300.0, True),
        (98, 299.0, False),  # less than half of the power in training: it waits in a collective
        (98, 900.0, True),
        (98, None, True),  # a GPU that reports no power
        (None, 600.0, None),
        ("N/A", 600.0, None),
    ],
)
def test_working_gpu_is_used_and_draws_at_least_half_of_its_power_in_training(
    tmp_path: Path, util: Any, power_w: Any, works: bool | None
) -> None:
    write_samples(tmp_path, (SILENT_SINCE - 1.0, [gpu()]), (NOW, [gpu(util, power_w)]))
    assert at_work(tmp_path) is works


@pytest.mark.parametrize(
    ("before", "works"),
    [
        ([(800.0, 600.0), (801.0, 100.0)], False),  # the peak counts, not the last sample
        ([(800.0, 100.0), (801.0, 600.0)], False),
        ([(800.0, 100.0), (SILENT_SINCE, 600.0)], True),  # 600 W were drawn after the last output
        ([(800.0, None), (801.0, 100.0)], True),
        ([(800.0, 600.0), (801.0, None)], False),
        ([], True),
    ],
)
def test_peak_power_of_a_gpu_is_measured_before_the_silence(
    tmp_path: Path, before: list[tuple[float, Any]], works: bool
) -> None:
    write_samples(
        tmp_path, *((at, [gpu(power_w=power)]) for at, power in before), (NOW, [gpu(power_w=120.0)])
    )
    assert at_work(tmp_path) is works


def test_peak_power_is_measured_again_for_each_silence(tmp_path: Path) -> None:
    activity = GpuActivity(str(tmp_path))
    write_samples(tmp_path, (800.0, [gpu(power_w=100.0)]), (NOW, [gpu(power_w=120.0)]))
    assert activity.at_work(SILENT_SINCE, NOW) is True
    write_samples(tmp_path, (850.0, [gpu(power_w=600.0)]), (NOW, [gpu(power_w=120.0)]))
    assert activity.at_work(SILENT_SINCE, NOW) is True  # the same silence
    assert activity.at_work(SILENT_SINCE - 10.0, NOW) is False
    assert activity.at_work(SILENT_SINCE + 10.0, NOW) is False


def test_power_of_each_gpu_is_compared_with_its_own_peak(tmp_path: Path) -> None:
    write_samples(
        tmp_path,
        (800.0, [gpu(power_w=600.0), gpu(power_w=100.0, index=1)]),
        (NOW, [gpu(power_w=120.0), gpu(power_w=90.0, index=1)]),
    )
    assert at_work(tmp_path) is True
    write_samples(tmp_path, (NOW, [gpu(power_w=120.0), gpu(power_w=40.0, index=1)]))
    assert at_work(tmp_path) is False
    write_samples(tmp_path, (800.0, [gpu(power_w=100.0)]), (NOW, [gpu(power_w=90.0)]), node=1)
    assert at_work(tmp_path) is True


def test_only_the_newest_sample_of_a_node_shows_whether_its_gpus_work(tmp_path: Path) -> None:
    write_samples(tmp_path, (990.0, [gpu()]), (995.0, [gpu(util=0)]))
    assert at_work(tmp_path) is False
    write_samples(tmp_path, (996.0, [gpu()]))
    assert at_work(tmp_path) is True


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps({"time": "soon", "node": "n0", "gpus": [gpu()]}),
        json.dumps({"node": "n0", "gpus": [gpu()]}),
        json.dumps({"time": NOW, "node": "n0", "gpus": "none"}),
        json.dumps({"time": NOW, "node": "n0", "gpus": ["H100"]}),
        json.dumps({"time": NOW, "node": "n0"}),
    ],
)
def test_gpus_are_unknown_without_valid_samples(tmp_path: Path, text: str) -> None:
    (tmp_path / "node-0.jsonl").write_text(text + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps({"time": NOW, "gpus": [gpu()]}) + "\n")
    assert at_work(tmp_path) is None


@pytest.mark.parametrize(("behind_s", "works"), [(100.0, True), (0.0, None)])
def test_sample_times_are_converted_to_the_clock_of_the_supervisor(
    tmp_path: Path, behind_s: float, works: bool | None
) -> None:
    write_samples(tmp_path, (NOW - 100.0, [gpu()]))
    activity = GpuActivity(str(tmp_path))
    activity.clocks = {"n0": behind_s, "n1": 100.0}
    assert activity.at_work(SILENT_SINCE, NOW) is works


# ---- Stacks ----


def stack(line: int | None = 7, function: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return {"threads": [{"frames": [{"function": function, "line": line}]}, {"frames": []}], **more}


def test_main_frames_are_the_functions_and_lines_of_the_first_thread() -> None:
    frames = [{"function": "wait", "line": 3}, {"function": "main"}]
    assert main_frames({"threads": [{"frames": frames}, {"frames": [{"function": "worker"}]}]}) == [
        ("wait", 3),
        ("main", None),
    ]
    without_frames: list[dict[str, Any]] = [{}, {"threads": []}, {"threads": [{"frames": None}]}]
    assert [main_frames(process) for process in without_frames] == [[], [], []]


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        ({1: stack()}, 3),
        ({1: stack(line=8)}, 1),
        ({1: stack(function="all_gather")}, 1),
        ({1: stack(moved=True)}, 1),  # the stack changed while it was read
        ({1: stack(moved=False)}, 3),
        ({1: {"threads": []}}, 1),
        ({2: stack()}, 1),
    ],
)
def test_stacks_are_alike_as_long_as_no_rank_moves(changed: dict[int, Any], alike: int) -> None:
    history = StackHistory()
    for at in (10.0, 20.0):
        history.add({0: stack(), 1: stack()}, at)
    history.add({0: stack(), **changed}, 30.0)
    assert (history.alike, history.began) == (alike, 10.0 if alike == 3 else 30.0)


def test_empty_answers_are_never_alike() -> None:
    history = StackHistory()
    for at in (10.0, 20.0, 30.0):
        history.add({}, at)
    assert history.alike == 1
    assert not history.is_stalled(1000.0, 20.0, 0)


@pytest.mark.parametrize(
    ("snapshots", "now", "ranks", "is_stalled"),
    [
        (3, 30.0, 2, True),
        (4, 40.0, 2, True),
        (2, 90.0, 2, False),  # too few snapshots
        (3, 29.9, 2, False),  # too short a time
        (3, 30.0, 1, True),
        (3, 30.0, 3, False),  # a rank is missing
        (3, 30.0, 0, False),
    ],
)
def test_stall_needs_several_equal_stacks_of_every_rank_over_some_time(
    snapshots: int, now: float, ranks: int, is_stalled: bool
) -> None:
    history = StackHistory()
    for number in range(snapshots):
        history.add({0: stack(), 1: stack()}, 10.0 + number)
    assert history.is_stalled(now, 20.0, ranks) is is_stalled


# ---- The activity of the ranks ----


class Activity:
    """A job whose ranks have written output once; its clock stands still unless a test moves the clock."""

    def __init__(self, folder: Path, timeout_s: float | None = 20.0, **more: Any) -> None:
        self.folder, self.now = folder, START
        (folder / "rank-0.log").write_text("started\n")
        self.detector = HangDetector(str(folder), str(folder), timeout_s, lambda: self.now, **more)
        self.detector.look({})

    def set_usage(self, after_s: float, usage: dict[int, tuple[float, float]]) -> None:
        """Let the ranks' usage have been read so many seconds after the start."""
        self.detector.used = (START + after_s, usage)

    def look(self, after_s: float, **process: Any) -> Hang | None:
        """Check the ranks so many seconds after the start; one rank is as described, the other one idles."""
        self.now = START + after_s
        return self.detector.look({0: process, 1: {"cpu": 1.0, "moved": 2.0, "state": "S"}})


@pytest.fixture
def activity(tmp_path: Path) -> Activity:
    return Activity(tmp_path)


@pytest.mark.parametrize(
    ("process", "is_idle"),
    [
        ({"cpu": 5.0, "moved": 0.0}, True),
        ({"cpu": 6.0, "moved": 0.0}, False),  # 0.1 CPUs over ten seconds
        ({"cpu": 5.9, "moved": 0.0}, True),
        ({"cpu": 5.0, "moved": 1e6}, False),  # 100 kB/s
        ({"cpu": 5.0, "moved": 9e5}, True),
    ],
)
def test_rank_is_idle_below_a_cpu_share_and_a_transfer_rate(
    activity: Activity, process: dict[str, float], is_idle: bool
) -> None:
    activity.set_usage(0.0, {0: (5.0, 0.0), 1: (1.0, 2.0)})
    assert activity.look(10.0, **process) is None
    assert activity.detector.idle is is_idle
    assert activity.detector.used == (START + 10.0, {0: tuple(process.values()), 1: (1.0, 2.0)})


def test_activity_is_measured_over_ten_seconds(activity: Activity) -> None:
    activity.set_usage(0.0, {0: (5.0, 0.0)})
    activity.look(9.9, cpu=5.0)
    assert (activity.detector.idle, activity.detector.used) == (False, (START, {0: (5.0, 0.0)}))
    activity.look(10.0, cpu=5.0)
    assert activity.detector.idle
    assert activity.detector.used[0] == START + 10.0


def test_rank_that_reports_for_the_first_time_has_used_nothing(activity: Activity) -> None:
    activity.set_usage(0.0, {})
    activity.look(10.0, cpu=500.0, moved=1e12)
    assert activity.detector.idle


def test_new_output_ends_the_idle_time(activity: Activity) -> None:
    activity.look(10.0, cpu=0.0)
    assert activity.detector.idle
    (activity.folder / "rank-0.log").write_text("another line\n")
    assert activity.look(19.0, cpu=0.0) is None
    detector = activity.detector
    assert (detector.idle, detector.gpus, detector.since, detector.pauses) == (False, None, START + 19.0, 1)
    assert detector.used == (START + 19.0, {0: (0.0, 0.0), 1: (1.0, 2.0)})
    assert (detector.longest, detector.silent()) == (19.0, 0.0)


@pytest.mark.parametrize(
    ("state", "is_hang"), [("T", True), ("t", True), ("Z", True), ("D", False), ("R", False)]
)
def test_stopped_process_hangs_even_while_other_ranks_compute(
    activity: Activity, state: str, is_hang: bool
) -> None:
    activity.set_usage(19.0, {})
    assert activity.look(19.9, cpu=0.0, state=state) is None
    assert (activity.look(20.0, cpu=100.0, state=state) is not None) is is_hang


@pytest.mark.parametrize(
    ("timeout_s", "longest", "steps", "pauses", "limit", "busy_limit"),
    [
        (20.0, 0.0, 0, 0, 20.0, 60.0),
        (20.0, 500.0, 9, 9, 20.0, 60.0),
        (None, 500.0, 2, 9, FIRST_S, 3 * FIRST_S),
        (None, 500.0, 3, 0, 2500.0, 7500.0),
        (None, 500.0, 0, 10, 2500.0, 7500.0),
        (None, 12.0, 4, 0, 60.0, FIRST_S),
        (None, 13.0, 0, 11, 65.0, FIRST_S),
        (None, 130.0, 4, 11, 650.0, 1950.0),
    ],
)
def test_hang_limit_is_configured_or_five_times_the_longest_pause(
    tmp_path: Path,
    timeout_s: float | None,
    longest: float,
    steps: int,
    pauses: int,
    limit: float,
    busy_limit: float,
) -> None:
    detector = HangDetector(str(tmp_path), str(tmp_path), timeout_s, lambda: NOW, longest=longest)
    detector.steps, detector.pauses = steps, pauses
    assert (detector.limit(), detector.busy_limit()) == (limit, busy_limit)


def test_training_steps_are_counted_by_the_growth_of_the_metrics(tmp_path: Path) -> None:
    activity = Activity(tmp_path)
    for number, name in enumerate(["rank-0.log", "train.jsonl", "rank-1.log", "train.jsonl", "other.log"]):
        with (tmp_path / name).open("a") as file:
            file.write("{}\n")
        activity.look(float(number))
    assert (activity.detector.pauses, activity.detector.steps) == (4, 2)
    (tmp_path / "train.jsonl").write_text("")
    activity.look(9.0)
    assert (activity.detector.pauses, activity.detector.steps) == (5, 2)


def test_stacks_are_needed_of_silent_ranks_that_are_not_idle(activity: Activity) -> None:
    for now, is_idle, is_needed in ((19.9, False, False), (20.0, False, True), (20.0, True, False)):
        activity.now, activity.detector.idle = START + now, is_idle
        assert activity.detector.wants_picture() is is_needed


@pytest.mark.parametrize(
    ("gpus", "timeout_s", "is_idle"),
    [
        ([gpu(util=0)], 100.0, True),  # idle GPUs are enough with a configured timeout
        ([gpu(util=0)], None, False),
        ([gpu()], 100.0, False),
        ([], 100.0, False),
    ],
)
def test_computing_ranks_with_idle_gpus_are_idle_if_a_timeout_is_configured(
    tmp_path: Path, gpus: list[Any], timeout_s: float | None, is_idle: bool
) -> None:
    activity = Activity(tmp_path, timeout_s)
    activity.set_usage(0.0, {0: (0.0, 0.0)})
    write_samples(tmp_path, (START + 10.0, gpus))
    activity.look(10.0, cpu=10.0)
    assert activity.detector.idle is is_idle


def test_working_gpus_are_not_idle_although_no_rank_computes(activity: Activity) -> None:
    write_samples(activity.folder, (START + 10.0, [gpu()]))
    activity.look(10.0, cpu=0.0)
    assert (activity.detector.gpus, activity.detector.idle) == (True, False)


@pytest.mark.parametrize(("gpus", "is_hang"), [(None, True), (False, True), (True, False)])
def test_equal_stacks_are_a_hang_unless_the_gpus_work(
    activity: Activity, gpus: bool | None, is_hang: bool
) -> None:
    for after_s in (0.0, 1.0, 2.0):
        activity.now = START + after_s
        activity.detector.see({0: stack(), 1: stack()})
    activity.detector.gpus = gpus
    activity.set_usage(25.0, {})
    assert (activity.look(25.0, state="R") is not None) is is_hang


def test_equal_stacks_are_a_hang_after_half_of_a_long_limit(tmp_path: Path) -> None:
    for at, is_hang in ((49.0, True), (51.0, False)):
        activity = Activity(tmp_path, 100.0)
        activity.now = START + at
        for _ in range(3):
            activity.detector.see({0: stack(), 1: stack()})
        activity.set_usage(100.0, {})
        assert (activity.look(100.0, state="R") is not None) is is_hang


# ---- A large job, whose nodes summarize the activity ----


def summary(**values: Any) -> ActivitySummary:
    fields = {
        "outputs": {"n0": 5}, "is_computing": False, "is_transferring": False, "has_stopped_rank": False,
        "rank_count": 4, **values,
    }  # fmt: skip
    return ActivitySummary(**fields)


def look_at_summaries(
    folder: Path, now: float, *summaries: ActivitySummary
) -> tuple[HangDetector, Hang | None]:
    """Return the detector of a large job after its last check, ``now`` seconds after its first one."""
    clock = [START]
    detector = HangDetector(str(folder), str(folder), 20.0, lambda: clock[0])
    hang = None
    for number, item in enumerate(summaries):
        clock[0] = START + (now if number == len(summaries) - 1 else 0.0)
        detector.read_activity = lambda item=item: item  # type: ignore[misc]
        hang = detector.look({})
    return detector, hang


@pytest.mark.parametrize(
    ("values", "now", "is_idle", "is_hang"),
    [
        ({}, 19.0, True, False),
        ({}, 20.0, True, True),
        ({"is_computing": True}, 19.0, False, False),
        ({"is_computing": True}, 20.0, False, False),
        ({"is_computing": True}, 60.0, False, True),
        ({"is_transferring": True}, 20.0, False, False),
        ({"is_computing": True, "has_stopped_rank": True}, 20.0, False, True),
        ({"outputs": {"n0": 6}}, 60.0, False, False),
    ],
)
def test_large_job_hangs_when_its_nodes_report_no_activity(
    tmp_path: Path, values: dict[str, Any], now: float, is_idle: bool, is_hang: bool
) -> None:
    detector, hang = look_at_summaries(tmp_path, now, summary(), summary(**values))
    assert (detector.idle, hang is not None) == (is_idle, is_hang)
    assert detector.used == (START + now, {})


@pytest.mark.parametrize(
    ("now", "is_computing", "gpus"),
    [(19.0, True, None), (19.0, False, True), (20.0, True, True), (30.0, True, True)],
)
def test_gpu_samples_of_a_large_active_job_are_read_only_after_the_hang_limit(
    tmp_path: Path, now: float, is_computing: bool, gpus: bool | None
) -> None:
    write_samples(tmp_path, (START + 15.0, [gpu()]))
    detector, _ = look_at_summaries(tmp_path, now, summary(), summary(is_computing=is_computing))
    assert detector.gpus is gpus


def test_log_files_of_a_large_job_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("started\n")
    (tmp_path / "train.jsonl").write_text("{}\n")
    detector, _ = look_at_summaries(tmp_path, 0.0, summary())
    assert detector.sizes == {"n0": 5, str(tmp_path / "train.jsonl"): 3}


def test_stacks_of_every_rank_of_a_large_job_are_needed(tmp_path: Path) -> None:
    for rank_count, is_hang in ((2, True), (3, False)):
        detector, _ = look_at_summaries(tmp_path, 0.0, summary(rank_count=rank_count))
        for _ in range(3):
            detector.see({0: stack(), 1: stack()})
        detector.clock = lambda: START + 25.0
        detector.used = (START + 25.0, {})
        assert (detector.look({}) is not None) is is_hang


# ---- The description of a hang ----


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda _detector: None, "no rank wrote output for 100 s"),
        (
            lambda detector: setattr(detector, "idle", True),
            "no rank wrote output for 100 s, and no rank computed",
        ),
        (
            lambda detector: setattr(detector.pictures, "alike", 3),
            "no rank wrote output for 100 s, and the stacks did not change",
        ),
        (lambda detector: setattr(detector.pictures, "alike", 2), "no rank wrote output for 100 s"),
        (
            lambda detector: setattr(detector, "steps", 3),
            "no rank wrote output for 100 s (the longest pause before: 12 s)",
        ),
    ],
)
def test_hang_summary_names_the_evidence(
    tmp_path: Path, prepare: Callable[[HangDetector], object], text: str
) -> None:
    detector = HangDetector(str(tmp_path), str(tmp_path), None, lambda: 900.0, longest=12.0)
    prepare(detector)
    assert detector.hang({}, NOW) == Hang(900.0, None, None, text)


def test_hang_summary_with_a_configured_timeout_mentions_no_pause(tmp_path: Path) -> None:
    detector = HangDetector(str(tmp_path), str(tmp_path), 50.0, lambda: 900.0, longest=12.0)
    detector.steps = 3
    assert detector.hang({}, NOW).summary == "no rank wrote output for 100 s"


def test_hang_summary_names_the_differing_rank_and_its_node(tmp_path: Path) -> None:
    detector = HangDetector(str(tmp_path), str(tmp_path), 50.0, lambda: 900.0)
    ranks = {3: {"state": "T", "node": "n7"}, 4: {"state": "R", "node": "n8"}}
    assert detector.hang(ranks, NOW) == Hang(
        900.0,
        3,
        "n7",
        "no rank wrote output for 100 s; rank 3 on n7 differs from the others: its process is stopped",
    )


@pytest.mark.parametrize(
    ("places", "result"),
    [
        ([], None),
        (["a"], None),
        (["a", "b"], None),  # two ranks cannot show which of them differs
        (["a", "a", "a"], None),
        (["a", "a", "b"], (2, "it is in b, the others are in a")),
        (["b", "a", "a"], (0, "it is in b, the others are in a")),
        (["a", "a", "b", "b"], None),
        (["a", "a", "b", "c"], None),
        (["a", "b", "b", "c", "c", "c"], (0, "it is in a, the others are in c")),
        (["a", "a", "b", ""], (2, "it is in b, the others are in a")),
        (["a", "a", ""], None),
    ],
)
def test_differing_rank_is_alone_in_its_function(places: list[str], result: tuple[int, str] | None) -> None:
    threads = [[{"frames": [{"function": place}] if place else []}] for place in places]
    assert find_differing_rank({rank: {"threads": thread} for rank, thread in enumerate(threads)}) == result


@pytest.mark.parametrize(
    ("state", "words"),
    [("T", "stopped"), ("t", "held by a debugger"), ("D", "stuck in the kernel"), ("Z", "dead")],
)
def test_differing_rank_is_the_lowest_whose_process_cannot_run(state: str, words: str) -> None:
    ranks = {9: {"state": state}, 4: {"state": state}, 1: {"state": "R"}}
    assert find_differing_rank(ranks) == (4, f"its process is {words}")


@pytest.mark.parametrize(
    ("process", "place"),
    [
        ({"threads": [{"frames": [{"function": name} for name in "abc"]}]}, "in a < b"),
        ({"threads": [{"frames": [{"function": "a"}]}], "waits": "poll"}, "in a"),
        ({"threads": [{"frames": [], "waits": "futex"}], "waits": "poll"}, "waiting for a lock"),
        ({"threads": [], "waits": "poll"}, "waiting for events"),
        ({}, ""),
    ],
)
def test_place_of_a_rank_is_its_innermost_functions_or_its_wait(process: dict[str, Any], place: str) -> None:
    assert place_of(process) == place
