"""The checks of a running attempt: their order, their intervals and the causes they return."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import attempt_monitor, lease, slurm
from dtslurm.worker.supervisor.attempt_monitor import AttemptMonitor
from dtslurm.worker.supervisor.attempts import Ledger
from dtslurm.worker.supervisor.hangs.detector import Hang
from dtslurm.worker.supervisor.heartbeats import Heartbeats

HANG = Hang(900.4, None, None, "no rank wrote output for 100 s")
LOST = {"cause": "node-failure", "node": "n2"}


class Detector:
    """A hang detector whose answers a test sets."""

    def __init__(self) -> None:
        self.hang_found: Hang | None = None
        self.idle, self.longest, self.silent_s, self.is_picture_wanted = False, 12.0, 0.0, False
        self.ranks: list[dict[int, Any]] = []
        self.stacks: list[dict[int, Any]] = []
        self.described: list[tuple[dict[int, Any], float]] = []

    def look(self, ranks: dict[int, Any]) -> Hang | None:
        self.ranks.append(ranks)
        return self.hang_found

    def silent(self) -> float:
        return self.silent_s

    def wants_picture(self) -> bool:
        return self.is_picture_wanted

    def see(self, stacks: dict[int, Any]) -> None:
        self.stacks.append(stacks)

    def hang(self, ranks: dict[int, Any], now: float) -> Hang:
        self.described.append((ranks, now))
        return HANG._replace(rank=3, node="n1", summary="rank 3 differs")


class Attempt:
    """Attempt 2 of a run, its supervisor and its step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.ranks, self.logs = str(folder / "ranks/2"), str(folder / "logs/2")
        Path(self.ranks).mkdir(parents=True)
        lease.take(str(folder), 2)
        self.ends_at = 1e9
        self.messages: list[str] = []
        self.requests: list[float] = []  # for messages to be sent
        self.agent_starts: list[tuple[str, ...]] = []
        self.queries: list[tuple[float, list[str], bool]] = []
        self.silent_nodes: list[tuple[str, float, str]] = []
        self.cut_off_cause: dict[str, Any] = {}
        self.lost_cause: dict[str, Any] = LOST
        self.supervisor = SimpleNamespace(
            run_dir=str(folder), nodes=["n1", "n2"], settings=SimpleNamespace(hang_timeout=0), top="/top",
            longest_pause=5.0, roles=None, term_at=None, in_doubt=False, ledger=Ledger(str(folder)),
            say=self.messages.append, limit_is_near=lambda: False, await_cancel=lambda: False,
            cut_off=self.cut_off, silent=self.note_silent, check_messages=lambda _number: None,
            notifications=SimpleNamespace(request=lambda: self.requests.append(self.now)),
        )  # fmt: skip

    def monitor(self, beats: Heartbeats | None = None) -> Any:
        beats = beats or Heartbeats(self.ranks, 10.0, lambda: self.now)
        result: Any = AttemptMonitor(self.supervisor, self, 2, ["n1", "n2"], beats)  # type: ignore[arg-type]
        result.quiet = Detector()
        return result

    def code(self) -> int | None:
        return 0 if self.now >= self.ends_at else None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000.0, "the attempt does not end"

    def start_agent(self, *words: str) -> None:
        self.agent_starts.append(words)

    def cut_off(self, nodes: list[str], is_idle: bool) -> dict[str, Any]:
        self.queries.append((self.now, nodes, is_idle))
        return self.cut_off_cause

    def note_silent(self, node: str, seconds: float, words: str) -> dict[str, Any]:
        self.silent_nodes.append((node, seconds, words))
        return self.lost_cause


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    result = Attempt(tmp_path)
    clock = SimpleNamespace(time=lambda: result.now, monotonic=lambda: result.now, sleep=result.sleep)
    monkeypatch.setattr(attempt_monitor, "time", clock)
    monkeypatch.setattr(slurm, "measure_clock", lambda: result.messages.append("clock"))
    return result


@pytest.mark.parametrize(
    ("node_count", "by_tcp", "every", "silence_every"),
    [
        (1, False, 2, 8),
        (127, False, 2, 8),
        (128, False, 4, 16),
        (191, False, 4, 16),
        (192, False, 5, 20),
        (1000, False, 5, 20),
        (1, True, 2, 8),
        (1000, True, 2, 20),
    ],
)
def test_checks_are_rarer_with_many_heartbeat_files(
    attempt: Attempt, node_count: int, by_tcp: bool, every: int, silence_every: int
) -> None:
    attempt.supervisor.nodes = ["n"] * node_count
    beats = Heartbeats(attempt.ranks)
    beats.arrive_by_tcp = by_tcp
    monitor = attempt.monitor(beats)
    assert (monitor.every, monitor.silence_every) == (every, silence_every)


@pytest.mark.parametrize(
    ("hang_timeout", "is_detected", "timeout_s"), [(-1, False, None), (0, True, None), (90, True, 90)]
)
def test_hang_timeout_is_configured_learned_or_disabled(
    attempt: Attempt, hang_timeout: int, is_detected: bool, timeout_s: float | None
) -> None:
    attempt.supervisor.settings.hang_timeout = hang_timeout
    monitor = AttemptMonitor(attempt.supervisor, attempt, 2, ["n1"])  # type: ignore[arg-type]
    detector = monitor.quiet
    assert (monitor.hangs, detector.timeout_s, detector.longest) == (is_detected, timeout_s, 5.0)
    assert (detector.logs, detector.metrics) == (attempt.logs, str(attempt.folder / "metrics/2"))
    assert detector.watched_gpus.clocks is monitor.beats.clocks
    assert detector.read_activity == monitor.beats.activity
    assert monitor.beats.folder == attempt.ranks + "/beats"


def test_checks_run_every_second_until_one_finds_a_cause(attempt: Attempt) -> None:
    monitor, times = attempt.monitor(), []
    causes: list[dict[str, Any]] = [{}, {}, LOST]

    def check() -> dict[str, Any]:
        times.append(attempt.now)
        return causes.pop(0)

    monitor._check = check
    assert monitor.until_the_end() == LOST
    assert times == [1001.0, 1002.0, 1003.0]
    assert monitor.rounds == 6


@pytest.mark.parametrize("ends_at", [1000.0, 1000.4, 1001.0])
def test_step_that_ends_by_itself_has_no_cause(attempt: Attempt, ends_at: float) -> None:
    attempt.ends_at = ends_at
    monitor = attempt.monitor()
    monitor._check = lambda: LOST
    assert monitor.until_the_end() == {}


def test_clock_of_the_controller_is_measured_every_minute(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    for monitor.rounds in range(2, 362, 2):
        monitor._check()
    assert attempt.messages == ["clock"] * 3


def cancel_after_the_stop_file(attempt: Attempt) -> None:
    (attempt.folder / "stop").touch()
    attempt.supervisor.await_cancel = lambda: True


def end_by_slurm_near_the_limit(attempt: Attempt) -> None:
    attempt.supervisor.limit_is_near = lambda: True
    attempt.supervisor.term_at = 0.0


@pytest.mark.parametrize(
    ("prepare", "cause"),
    [
        (lambda one: None, {}),
        (lambda one: lease.take(str(one.folder), 3), {"cause": "stale"}),
        (
            lambda one: (one.folder / "stop").touch(),
            {"cause": "cancelled", "blame": "user", "summary": "the file 'stop' exists"},
        ),
        (cancel_after_the_stop_file, {}),
        (
            lambda one: setattr(one.supervisor, "limit_is_near", lambda: True),
            {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"},
        ),
        (end_by_slurm_near_the_limit, {}),
        (
            lambda one: (one.folder / "restart").write_text("2\n"),
            {"cause": "restart-request", "blame": "user", "summary": "the user requested a restart"},
        ),
        (lambda one: (one.folder / "restart").write_text("1\n"), {}),  # of the attempt before
        (lambda one: (one.folder / "restart").write_text("half"), {}),
        (
            lambda one: setattr(one.supervisor, "roles", SimpleNamespace(problem=lambda: {"cause": "role"})),
            {"cause": "role"},
        ),
        (lambda one: setattr(one.supervisor, "roles", SimpleNamespace(problem=dict)), {}),
    ],
)
def test_check_returns_the_first_cause_to_end_the_step(
    attempt: Attempt, prepare: Any, cause: dict[str, Any]
) -> None:
    prepare(attempt)
    assert attempt.monitor()._check() == cause


def test_restart_is_looked_for_as_rarely_as_silent_nodes(attempt: Attempt) -> None:
    (attempt.folder / "restart").write_text("2\n")
    monitor = attempt.monitor()
    for monitor.rounds in (2, 4, 6):
        assert monitor._check() == {}
    monitor.rounds = 8
    assert monitor._check()["cause"] == "restart-request"


def test_restarted_agent_is_reported_and_recorded(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.agents.look, monitor.rounds = lambda: ["n1"], 2
    assert monitor._check() == {}
    assert attempt.messages == [
        "the agent on n1 stopped its heartbeats and was restarted; its ranks continue"
    ]
    [event] = attempt.supervisor.ledger.events("agent_restarted")
    assert (event["attempt"], event["node"]) == (2, "n1")


def test_silent_agent_is_started_beside_the_ranks(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.agents.start("n2")
    assert attempt.agent_starts == [("/top", "n2", attempt.ranks + "/beats/n2.log")]


@pytest.mark.parametrize("cause", [LOST, {}])
def test_lost_node_ends_the_step_unless_slurm_does_not_answer(
    attempt: Attempt, cause: dict[str, Any]
) -> None:
    monitor = attempt.monitor()
    attempt.lost_cause = cause
    assert monitor._check() == {}
    assert attempt.silent_nodes == []
    monitor.agents.lost, monitor.agents.words = lambda: "n2", lambda name: f"no step on {name}"
    assert monitor._check() == cause
    assert attempt.silent_nodes == [("n2", 10.0, "no step on n2")]


@pytest.mark.parametrize(
    ("text", "ends_after_s"),
    [("1 3\n", 6.5), ("1 85\n", None), ("1\n", None), ("1 3 5\n", None), ("", None)],
)
def test_other_ranks_have_six_seconds_to_end_after_a_failure(
    attempt: Attempt, text: str, ends_after_s: float | None
) -> None:
    monitor = attempt.monitor()
    (attempt.folder / "ranks/2/first-failure").write_text(text)
    results = []
    for number in range(20):
        attempt.now = 1000.0 + 0.5 * number
        results.append(monitor._check_failed_rank())
    first_end = results.index({"end": True}) / 2 if {"end": True} in results else None
    assert first_end == ends_after_s


def test_output_of_the_ranks_is_checked_at_its_own_interval(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    for monitor.rounds in range(2, 34, 2):
        monitor._check()
    assert len(monitor.quiet.ranks) == 4
    assert attempt.supervisor.longest_pause == 12.0


def test_failed_rank_comes_before_a_hang(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor._check_failed_rank, monitor._check_silence = lambda: {"end": True}, lambda: {"cause": "hang"}
    monitor.rounds = 8
    assert monitor._check() == {"end": True}
    monitor._check_failed_rank = dict
    assert monitor._check() == {"cause": "hang"}


# ---- Silent ranks ----


@pytest.mark.parametrize(
    ("silent_s", "is_idle", "in_doubt", "pauses"),
    [
        (15.0, True, True, 0),
        (15.5, False, False, 2),
        (15.5, True, False, 5),
        (15.5, False, True, 5),
    ],
)
def test_slurm_is_queried_about_silent_ranks_more_often_if_a_node_may_be_lost(
    attempt: Attempt, silent_s: float, is_idle: bool, in_doubt: bool, pauses: int
) -> None:
    monitor = attempt.monitor()
    monitor.quiet.silent_s, monitor.quiet.idle = silent_s, is_idle
    attempt.supervisor.in_doubt = in_doubt
    for number in range(40):  # with a query each 32 or 9 s
        attempt.now = 1000.0 + number
        assert monitor._check_silence() == {}
    assert len(attempt.queries) == pauses
    assert attempt.queries[:1] == ([(1000.0, ["n1", "n2"], is_idle)] if pauses else [])


def test_first_query_waits_for_no_pause_and_the_next_ones_do(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.quiet.silent_s = 20.0
    for now in (1000.0, 1030.0, 1030.5, 1060.5, 1061.0):
        attempt.now = now
        monitor._check_silence()
    assert [at for at, *_ in attempt.queries] == [1000.0, 1030.5, 1061.0]
    monitor.quiet.idle = True
    attempt.queries.clear()
    for now in (1069.0, 1069.5):
        attempt.now = now
        monitor._check_silence()
    assert [at for at, *_ in attempt.queries] == [1069.5]


def test_slurm_is_queried_soon_after_the_node_has_booted(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.quiet.silent_s, attempt.now = 20.0, 3.0
    monitor._check_silence()
    assert [at for at, *_ in attempt.queries] == [3.0]


def test_cut_off_node_explains_a_hang(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.quiet.hang_found, attempt.cut_off_cause = HANG, LOST
    assert monitor._check_silence() == LOST
    assert attempt.supervisor.ledger.events("hang") == []


def test_hang_is_recorded_although_slurm_was_queried_a_moment_ago(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.beats.stacks = lambda _patience_s: {}
    monitor.beats.ranks = lambda: {4: {}, 1: {}}
    monitor.quiet.hang_found, monitor.asked_at = HANG, attempt.now
    assert monitor._check_silence() == {
        "cause": "hang", "blame": "unknown", "rank": None, "node": None, "summary": HANG.summary,
    }  # fmt: skip
    [event] = attempt.supervisor.ledger.events("hang")
    assert (event["attempt"], event["ranks"], event["since"]) == (2, [1, 4], 900)
    assert len(attempt.queries) == 1
    assert monitor.quiet.ranks == [{4: {}, 1: {}}]


def test_hang_is_only_recorded_if_hang_detection_is_disabled(attempt: Attempt) -> None:
    attempt.supervisor.settings.hang_timeout = -1
    monitor = attempt.monitor()
    monitor.quiet.hang_found, monitor.quiet.is_picture_wanted = HANG, True
    assert [monitor._check_silence() for _ in range(3)] == [{}, {}, {}]
    assert attempt.queries == []
    assert not (attempt.folder / "ranks/2/stacks").exists()
    [event] = attempt.supervisor.ledger.events("stalled")
    assert (event["attempt"], event["summary"]) == (2, HANG.summary)
    assert len(attempt.requests) == 1


@pytest.mark.parametrize(
    ("rank", "stacks", "is_described_by_stacks"),
    [(None, {0: {}}, True), (None, {}, False), (1, {0: {}}, False)],
)
def test_stacks_describe_a_hang_without_a_differing_rank(
    attempt: Attempt, rank: int | None, stacks: dict[int, Any], is_described_by_stacks: bool
) -> None:
    monitor, patience_s = attempt.monitor(), []

    def read_stacks(seconds: float) -> dict[int, Any]:
        patience_s.append(seconds)
        return stacks

    monitor.beats.stacks = read_stacks
    result = monitor._report_hang(HANG._replace(rank=rank))
    assert result["summary"] == ("rank 3 differs" if is_described_by_stacks else HANG.summary)
    assert monitor.quiet.described == ([(stacks, 1000.0)] if is_described_by_stacks else [])
    assert patience_s == [15.0]


def test_hang_of_a_large_job_is_described_by_the_states_of_its_ranks(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    monitor.beats.arrive_by_tcp = True
    monitor.beats.ranks, monitor.beats.stacks = lambda: {7: {}}, lambda _patience_s: {}
    assert monitor._check_silence() == {}
    assert monitor.quiet.described == []
    monitor.quiet.hang_found = HANG
    assert monitor._check_silence()["rank"] == 3
    assert monitor.quiet.ranks == [{}, {}]  # the nodes summarize the activity
    assert monitor.quiet.described == [({7: {}}, 1000.0)]


def test_stacks_are_requested_again_after_each_complete_answer(attempt: Attempt) -> None:
    monitor = attempt.monitor()
    answers: list[Any] = [({}, False), ({0: {}}, True), ({0: {}}, False), ({1: {}}, False), ({}, False)]
    monitor.beats.reported_stacks = lambda: answers.pop(0)
    requests: list[float] = []
    monitor.beats.ask_stacks = lambda: requests.append(attempt.now)
    monitor._update_stacks()
    assert requests == []  # no stacks are needed
    monitor.quiet.is_picture_wanted = True
    for now, count in ((7.0, 0), (8.0, 0), (9.0, 1), (23.5, 1), (24.0, 2), (46.0, 3)):
        attempt.now = now
        monitor._update_stacks()
        assert monitor.quiet.stacks == [{0: {}}, {}, {}][:count]
    assert requests == [7.0, 9.0, 24.0, 46.0]  # the last two because an answer was late
    monitor.quiet.is_picture_wanted = False
    monitor._update_stacks()
    assert monitor.pictured_at == 0.0
