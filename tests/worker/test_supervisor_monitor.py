"""The delay until the supervisor notices a fault, with a simulated clock."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import attempt_monitor, heartbeats, lease, node
from dtslurm.worker.supervisor.attempts import Ledger
from dtslurm.worker.supervisor.hangs.detector import HangDetector
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from tests.worker.test_supervisor_hangs import stacks


class Site:
    """A run whose nodes n0 and n1 give signs of life; time passes when the supervisor sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = str(folder / "ranks/0")
        self.logs = str(folder / "logs/0")
        (folder / "ranks/0/beats").mkdir(parents=True)
        lease.take(str(folder), 0)
        self.now = 1000.0
        self.over_at = 2000.0
        self.dies_at = math.inf  # the second node
        self.last_sign = 0.0
        self.cpu: Callable[[float], float] = lambda _now: 5.0
        self.asked: list[float] = []
        self.noticed_at = math.inf  # by Slurm, that n1 is gone
        self.slurm_is_down = False

    def code(self) -> int | None:
        return 0 if self.now >= self.over_at else None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now % node.BEAT_S:
            return
        for name in ("n0", "n1")[: 1 if self.now > self.dies_at else 2]:
            record = {"kind": "beat", "node": name, "time": self.now}
            record["ranks"] = {name[1:]: {"cpu": self.cpu(self.now), "moved": 0.0, "state": "S"}}
            (self.folder / "ranks/0/beats" / f"{name}.json").write_text(json.dumps(record))
            self.last_sign = self.now if name == "n1" else self.last_sign

    def start_agent(self, _program: str, name: str, log: str) -> None:
        Path(log).write_text(f"srun: error: {name} does not answer\n")

    def silent(self, name: str, seconds: float, words: str) -> dict[str, Any]:
        if self.slurm_is_down:
            return {}
        return {"cause": "node-failure", "node": name, "summary": f"{seconds} {words}"}

    def cut_off(self, _nodes: object, _idle: bool) -> dict[str, Any]:
        self.asked.append(self.now)
        return {"cause": "node-failure", "node": "n1"} if self.now >= self.noticed_at else {}

    def watch(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 2, hang_timeout: float = 0) -> Any:
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(attempt_monitor, "time", clock)
        keeper = SimpleNamespace(
            run_dir=str(self.folder), nodes=[f"n{number}" for number in range(nodes)], lost=[], term_at=None,
            settings=SimpleNamespace(hang_timeout=hang_timeout, total_time=0), limit_is_near=lambda: False,
            longest_pause=0.0, in_doubt=False, cut_off=self.cut_off, silent=self.silent, top="", roles=None,
            ledger=Ledger(str(self.folder)), check_messages=lambda _number: None,
            notifications=SimpleNamespace(request=lambda: None),
        )  # fmt: skip
        result = attempt_monitor.AttemptMonitor(keeper, self, 0, keeper.nodes)  # type: ignore[arg-type]
        result.beats = result.agents.beats = Heartbeats(self.ranks, clock=clock.monotonic)
        result.quiet = HangDetector(self.logs, self.logs, result.quiet.timeout_s, clock.time)
        return result


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("nodes", [2, 64, 65, 128, 192, 319, 320, 1000, 10_000])
def test_f41_lost_node_is_noticed_within_15_s_for_any_number_of_nodes(
    site: Site, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    looks: list[float] = []
    for phase in range(6):  # of the signs against the looks
        site.now, site.dies_at = 1000.0 + phase * attempt_monitor.LOOK_S, 1031.0
        for old in (site.folder / "ranks/0/beats").iterdir():
            old.unlink()
        watch = site.watch(monkeypatch, nodes)
        answer: list[float] = []
        look = watch.beats.look
        watch.beats.look = lambda answer=answer, look=look: (answer.append(site.now), look())
        result = watch.until_the_end()
        assert (result["cause"], result["node"]) == ("node-failure", "n1")
        assert watch.beats.silent_s < site.now - site.last_sign <= 15.0
        looks += [later - sooner for sooner, later in itertools.pairwise(answer)]
    assert max(looks) <= 2.5
    assert min(looks) >= (1.0 if nodes < 128 else 2.0)  # the more nodes, the more there is to read


def test_f87_no_node_is_lost_while_slurm_can_start_no_step(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cpu = lambda now: now
    site.dies_at, site.slurm_is_down, site.over_at = 1031.0, True, 1300.0
    watch = site.watch(monkeypatch)
    assert watch.until_the_end() == {}
    site.slurm_is_down, site.over_at = False, 1400.0
    assert "n1 does not answer" in watch.until_the_end()["summary"]


@pytest.mark.parametrize("noticed_after", [5, 16, 18, 31, 47, 100])
@pytest.mark.parametrize("hang_timeout", [0, 300, -1])
def test_f41_unreachable_node_is_reported_soon_after_slurm_notices(
    site: Site, monkeypatch: pytest.MonkeyPatch, noticed_after: int, hang_timeout: float
) -> None:
    began = site.now
    site.noticed_at = began + noticed_after
    result = site.watch(monkeypatch, hang_timeout=hang_timeout).until_the_end()
    assert result["node"] == "n1"
    assert site.now <= max(site.noticed_at + 10.0, began + attempt_monitor.QUIET_S + 2.0)


def test_f41_slurm_is_queried_less_often_about_computing_ranks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cpu, site.over_at = lambda now: now, site.now + 200.0
    watch = site.watch(monkeypatch)
    assert watch.until_the_end() == {}
    pauses = [later - sooner for sooner, later in itertools.pairwise(site.asked)]
    assert len(pauses) >= 4
    assert min(pauses) > attempt_monitor.ASK_AGAIN_S
    watch.supervisor.in_doubt = True  # a node owes Slurm an answer
    site.asked, site.over_at = [], site.now + 60.0
    watch.until_the_end()
    assert len(site.asked) >= 5


def test_f45_hang_detection_can_be_disabled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.over_at = 5000.0
    assert site.watch(monkeypatch, hang_timeout=-1).until_the_end() == {}
    assert not site.folder.joinpath("ranks/0/stacks").exists()
    assert len(Ledger(str(site.folder)).events("stalled")) == 1


def provide_stacks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both nodes tell what their ranks do as soon as they are asked to; all wait at one place."""
    folder, sleep = site.folder / "ranks/0/stacks", site.sleep

    def sleep_and_tell(seconds: float) -> None:
        sleep(seconds)
        if (folder / heartbeats.WANTED).exists():
            for rank in range(2):
                answer = {
                    "number": int((folder / heartbeats.WANTED).read_text()),
                    "ranks": {rank: stacks()[rank]},
                }
                (folder / f"n{rank}.json").write_text(json.dumps(answer))

    monkeypatch.setattr(site, "sleep", sleep_and_tell)
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(sleep=sleep_and_tell, time=lambda: site.now))


@pytest.mark.parametrize("spins", [False, True])
def test_f45_hang_is_recorded_with_its_evidence(
    site: Site, monkeypatch: pytest.MonkeyPatch, spins: bool
) -> None:
    began, site.over_at = site.now, 9000.0
    site.cpu = (lambda now: now) if spins else (lambda _now: 5.0)
    provide_stacks(site, monkeypatch)
    watch = site.watch(monkeypatch, hang_timeout=60)
    answer = watch.until_the_end()
    assert (answer["cause"], answer["rank"], answer["node"]) == ("hang", None, None)
    assert answer["summary"].startswith("no rank wrote output for ")
    # Ranks that compute are no hang until their stacks have stood still several times.
    assert answer["summary"].endswith("and the stacks did not change" if spins else "and no rank computed")
    assert began + 60 < site.now < began + (260 if spins else 90)
    [result] = watch.supervisor.ledger.events("hang")
    assert (result["ranks"], result["summary"]) == ([0, 1], answer["summary"])


@pytest.mark.parametrize(("function", "blame"), [("sleep", "code"), ("all_reduce", "unknown")])
def test_f45_hang_in_the_training_code_is_no_fault_of_the_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, function: str, blame: str
) -> None:
    frame = {"function": "step", "file": "/home/me/train.py", "line": 3}
    library = {"function": function, "file": "/env/lib/python3.11/site-packages/torch/distributed/x.py"}
    thread = {"state": "S", "waits": "nanosleep", "frames": [frame]}
    thread["frames"] = [frame] if function == "sleep" else [library, frame]
    rank = {"state": "S", "threads": [thread], "node": "n1"}
    watch = site.watch(monkeypatch, hang_timeout=60)
    monkeypatch.setattr(watch.beats, "stacks", lambda _patience_s: {**stacks(), 1: rank})
    answer = watch._report_hang(watch.quiet.hang({}, site.now))
    assert (answer["rank"], answer["node"], answer["blame"]) == (1, "n1", blame)


def test_f45_stacks_of_only_some_ranks_do_not_prove_a_hang(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.over_at = site.now + 150
    site.cpu = lambda now: now
    watch = site.watch(monkeypatch, hang_timeout=60)
    assert watch.until_the_end() == {}
    asked = int((site.folder / "ranks/0/stacks" / heartbeats.WANTED).read_text())
    assert asked >= 4  # and yet they are asked again and again
