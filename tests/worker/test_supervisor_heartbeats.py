"""Heartbeats in files, and the agents that the supervisor restarts, with a clock that a test sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import agents, heartbeats
from dtslurm.worker.supervisor.agents import Agents
from dtslurm.worker.supervisor.heartbeats import Heartbeats


class Site:
    """The files of an attempt's nodes, and the supervisor's clocks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.wall_time = folder, 1000.0, 5000.0
        (folder / "beats").mkdir()
        self.beats = Heartbeats(str(folder), 10.0, lambda: self.now)
        self.started: list[str] = []
        self.agents = Agents(self.beats, self.started.append)

    def write(self, name: str, kind: str = "beat", **values: Any) -> None:
        record = {"kind": kind, "node": name, "time": self.now, "ranks": {}, **values}
        (self.folder / f"beats/{name}.json").write_text(json.dumps(record))

    def set_ages(self, **ages: float) -> None:
        """Let the last heartbeat of each node be so many seconds old."""
        self.beats.last = {name: {"kind": "beat", "node": name} for name in ages}
        self.beats.last_seen = {name: self.now - age_s for name, age_s in ages.items()}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000.0, "the supervisor waits for ever"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    result = Site(tmp_path)
    clock = SimpleNamespace(time=lambda: result.wall_time, monotonic=lambda: result.now, sleep=result.sleep)
    monkeypatch.setattr(heartbeats, "time", clock)
    monkeypatch.setattr(agents, "time", clock)
    return result


# ---- Heartbeats ----


def test_heartbeat_is_dated_when_its_file_has_changed(site: Site) -> None:
    site.write("n1")
    site.write("n2")
    (site.folder / "beats/a.txt").write_text('{"node": "n3"}')
    (site.folder / "beats/b.json").write_text("{}")
    site.beats.look()
    site.now = 1003.0
    site.write("n2")
    site.beats.look()
    assert site.beats.last_seen == {"n1": 1000.0, "n2": 1003.0}
    assert site.beats.last["n2"] == {"kind": "beat", "node": "n2", "time": 1003.0, "ranks": {}}


def test_slow_reading_does_not_age_the_heartbeats(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write("n1")
    site.beats.look()
    for pause_s, age_s in ((8.0, 8.0), (8.5, 8.0), (30.0, 8.0), (2.0, 10.0)):
        site.now += pause_s
        site.beats.look()
        assert site.now - site.beats.last_seen["n1"] == age_s
    assert site.beats.looked == site.now


@pytest.mark.parametrize(
    ("sent_at", "behind_s"),
    [([4990.0, 4998.0, 4995.0], 2.0), ([5100.0], -100.0), ([5100.0, 5090.0], -100.0), (["soon"], None)],
)
def test_clock_of_a_node_is_compared_by_its_fastest_heartbeat(
    site: Site, sent_at: list[Any], behind_s: float | None
) -> None:
    for at in sent_at:
        site.write("n1", time=at)
        site.beats.look()
    assert site.beats.clocks == ({} if behind_s is None else {"n1": behind_s})


@pytest.mark.parametrize(
    ("ages", "silent"),
    [
        ({"n1": 7.0, "n2": 0.0}, []),
        ({"n1": 7.5, "n2": 0.0}, ["n1"]),
        ({"n1": 7.5, "n2": 4.5}, ["n1"]),
        ({"n1": 7.5, "n2": 5.0}, []),  # no node writes any: the file system has stalled
        ({"n1": 40.0, "n2": 39.0}, []),
        ({"n1": 40.5, "n2": 39.0}, ["n1"]),
        ({"n1": 7.5}, ["n1"]),
        ({"n1": 7.0}, []),
        ({}, []),
    ],
)
def test_node_is_silent_while_other_nodes_write_heartbeats(
    site: Site, ages: dict[str, float], silent: list[str]
) -> None:
    site.set_ages(**ages)
    assert site.beats.silent(7.0) == silent


def test_node_with_a_farewell_is_not_silent(site: Site) -> None:
    site.set_ages(n1=50.0, n2=50.0, n3=0.0)
    site.beats.last["n2"]["kind"] = "bye"
    assert site.beats.silent(7.0) == ["n1"]
    assert site.beats.still_there() == ["n1", "n3"]


def test_nodes_without_a_farewell_are_known_if_another_node_wrote_one(site: Site) -> None:
    site.set_ages(n3=0.0, n2=3.0, n1=5.0)
    assert site.beats.without_farewell() == []
    site.beats.last["n4"] = {"kind": "bye"}
    assert site.beats.without_farewell() == ["n1", "n2", "n3"]
    site.beats.mark_alive(site.now - 3.0)  # n2 was seen exactly then
    assert site.beats.without_farewell() == ["n1", "n2"]


def test_states_of_the_ranks_are_returned_with_their_nodes(site: Site) -> None:
    site.write("n1", ranks={"0": {"cpu": 1.0}, "1": {"cpu": 2.0}})
    site.write("n2", ranks=None)
    site.beats.look()
    assert site.beats.ranks() == {0: {"cpu": 1.0, "node": "n1"}, 1: {"cpu": 2.0, "node": "n1"}}
    assert site.beats.activity() is None
    assert not site.beats.arrive_by_tcp
    assert site.beats.log_of("n1") == str(site.folder / "beats/n1.log")


def write_stacks(site: Site, name: str, number: int, rank: int) -> None:
    text = json.dumps({"number": number, "ranks": {str(rank): {"by": "py-spy"}}})
    (site.folder / f"stacks/{name}.json").write_text(text)


def test_stacks_are_complete_when_every_node_has_answered_the_last_request(site: Site) -> None:
    site.set_ages(n1=0.0, n2=0.0)
    site.beats.ask_stacks()
    site.beats.ask_stacks()
    assert (site.folder / "stacks/wanted").read_text() == "2\n"
    first, second = {0: {"by": "py-spy", "node": "n1"}}, {1: {"by": "py-spy", "node": "n2"}}
    write_stacks(site, "n2", 1, 1)
    assert site.beats.reported_stacks() == ({}, False)
    write_stacks(site, "n1", 2, 0)
    assert site.beats.reported_stacks() == (first, False)
    write_stacks(site, "n2", 3, 1)
    assert site.beats.reported_stacks() == (first, False)
    write_stacks(site, "n2", 2, 1)
    assert site.beats.reported_stacks() == ({**first, **second}, True)


def test_stacks_are_awaited_for_a_limited_time(site: Site) -> None:
    site.set_ages(n1=0.0)
    assert site.beats.stacks(2.0) == {}
    assert site.now == pytest.approx(1002.0, abs=0.3)
    (site.folder / "stacks/n1.json").write_text(json.dumps({"number": 2, "ranks": {"0": {}}}))
    before = site.now
    assert site.beats.stacks(2.0) == {0: {"node": "n1"}}
    assert site.now == before


# ---- Restarted agents ----


@pytest.mark.parametrize(("age_s", "started"), [(5.0, []), (5.5, ["n1"])])
def test_silent_agent_is_restarted(site: Site, age_s: float, started: list[str]) -> None:
    site.set_ages(n1=age_s, n2=0.0)
    assert site.agents.look() == []
    assert site.started == started
    assert site.agents.started == dict.fromkeys(started, 1000.0)


def test_agent_is_restarted_again_if_it_does_not_start_within_a_minute(site: Site) -> None:
    times: list[float] = []
    for now in (1000.0, 1030.0, 1059.5, 1060.0, 1090.0, 1121.0):
        site.now = now
        site.set_ages(n1=20.0, n2=0.0)
        site.agents.look()
        times += [now] * (len(site.started) - len(times))
    assert times == [1000.0, 1060.0, 1121.0]


def test_recovered_node_is_reported_once(site: Site) -> None:
    site.set_ages(n1=20.0, n2=20.0, n3=0.0)
    site.agents.look()
    site.set_ages(n1=0.0, n2=0.0, n3=0.0)
    site.beats.last["n1"]["restarted"] = True  # the own agent of n2 has returned
    assert site.agents.look() == ["n1"]
    assert site.agents.started == {}
    assert site.agents.look() == []


def test_restarted_agent_that_is_still_silent_has_not_recovered(site: Site) -> None:
    site.set_ages(n1=20.0, n2=0.0)
    site.agents.look()
    site.beats.last["n1"]["restarted"] = True
    assert site.agents.look() == []
    assert site.started == ["n1"]


def test_only_four_agents_start_at_once(site: Site) -> None:
    site.set_ages(n0=0.0, **{f"n{number}": 20.0 for number in range(1, 7)})
    site.agents.look()
    assert site.started == ["n1", "n2", "n3", "n4"]
    site.now += 1.0
    site.set_ages(n0=0.0, n1=0.0, **{f"n{number}": 20.0 for number in range(2, 7)})
    site.agents.look()
    assert site.started == ["n1", "n2", "n3", "n4", "n5"]


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({}, "n1"),
        ({"age_s": 10.0}, None),
        ({"age_s": 10.5}, "n1"),
        ({"started_ago_s": 4.5}, None),
        ({"started_ago_s": 5.0}, "n1"),
        ({"started_ago_s": 7.0}, "n1"),
        ({"started_ago_s": None}, None),  # no agent has been started there
        ({"own": "n1"}, None),
        ({"log": "started\n"}, None),
        ({"log": "srun: step started late\n"}, None),
        ({"log": "srun: error: not-started\n"}, "n1"),
        ({"log": ""}, "n1"),
    ],
)
def test_node_is_lost_if_it_stays_silent_and_starts_no_agent(
    site: Site, values: dict[str, Any], lost: str | None
) -> None:
    site.set_ages(n1=values.get("age_s", 20.0), n2=0.0)
    site.beats.own = values.get("own", "n2")
    started_ago_s = values.get("started_ago_s", 5.0)
    if started_ago_s is not None:
        site.agents.started = {"n1": site.now - started_ago_s}
    if "log" in values:
        (site.folder / "beats/n1.log").write_text(values["log"])
    assert site.agents.lost() == lost


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (None, ""),
        ("started\n", ""),
        ("srun: error: one\n  srun: error: two  \nbye\n", "srun: error: two"),
        ("srun: error: " + "x" * 300, "srun: error: " + "x" * 187),
    ],
)
def test_last_error_of_srun_describes_why_no_agent_started(site: Site, log: str | None, words: str) -> None:
    if log is not None:
        (site.folder / "beats/n1.log").write_text(log)
    assert site.agents.words("n1") == words


# ---- Steps beside the ranks ----


def test_step_beside_the_ranks_has_no_variables_of_the_batch_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ("SLURM_NNODES", "SLURMD_NODENAME", "SRUN_DEBUG", "SBATCH_EXPORT")
    visible = ("SLURM_CONF", "SLURM_JOB_ID", "MY_SLURM_FILE")
    for name in (*hidden, *visible):
        monkeypatch.setenv(name, "1")
    (tmp_path / "health.json").write_text('{"srun_options": ["--network=x", 7]}')
    command, env = agents.step_on(str(tmp_path), "n7")
    assert command == [
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=n7", "--overlap", "--mpi=none", "--mem=0",
        "--gres=none", "--cpu-bind=none", "--network=x", "7",
    ]  # fmt: skip
    assert [name for name in (*hidden, *visible) if name in env] == list(visible)
    (tmp_path / "health.json").unlink()
    assert agents.step_on(str(tmp_path), "n7")[0][-1] == "--cpu-bind=none"


class FakeProcess:
    """A probe that ends with a code after some time; None if it hangs."""

    def __init__(self, site: Site, code: int | None, seconds: float) -> None:
        self.site, self.code, self.ends_at = site, code, site.now + seconds
        self.returncode: int | None = None
        self.is_killed = False

    def poll(self) -> int | None:
        if self.is_killed:
            self.returncode = -9
        elif self.code is not None and self.site.now >= self.ends_at:
            self.returncode = self.code
        return self.returncode

    def kill(self) -> None:
        self.is_killed = True

    def wait(self) -> None:
        assert self.poll() is not None


@pytest.mark.parametrize(
    ("probes", "answering", "seconds"),
    [
        ({"n1": (0, 0.0), "n2": (0, 3.0)}, ["n1", "n2"], 3.0),
        ({"n1": (1, 0.0), "n2": (0, 1.0)}, ["n2"], 1.0),
        ({"n1": (0, 1.0), "n2": (None, 0.0)}, ["n1"], 10.0),
        ({}, [], 0.0),
    ],
)
def test_node_answers_if_a_probe_step_ends_there_in_time(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    probes: dict[str, tuple[int | None, float]],
    answering: list[str],
    seconds: float,
) -> None:
    processes: list[FakeProcess] = []

    def start(command: list[str], **_: object) -> FakeProcess:
        assert command[-1] == "true"
        processes.append(FakeProcess(site, *probes[command[3].split("=")[1]]))
        return processes[-1]

    fake: Callable[..., Any] = start
    monkeypatch.setattr(agents, "subprocess", SimpleNamespace(Popen=fake, DEVNULL=None))
    assert agents.answering("", list(probes)) == answering
    assert site.now - 1000.0 == pytest.approx(seconds, abs=0.2)
    assert [process.is_killed for process in processes] == [code is None for code, _ in probes.values()]
