"""Hang detection: silence of the ranks, and the evidence against a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor.hangs.detector import FIRST_S, HangDetector, find_differing_rank
from dtslurm.worker.supervisor.hangs.own_code import waits_in_own_code
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from dtslurm.worker.supervisor.node import NodeAgent, bytes_of


class Site:
    """A run directory whose ranks are as told; time passes a second at a look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.behind = 0.0  # seconds by which the sampler's clock is

    def quiet(self, timeout_s: float | None, **more: Any) -> HangDetector:
        return HangDetector(str(self.folder), str(self.folder), timeout_s, lambda: self.now, **more)

    def say(self, rank: int = 0) -> None:
        with (self.folder / f"rank-{rank}.log").open("a") as file:
            file.write("something\n")

    def step(self) -> None:
        with (self.folder / "train.jsonl").open("a") as file:
            file.write('{"step": 1}\n')

    def gpus(self, util: int, power: float) -> None:
        gpu = {"index": 0, "util": util, "power_w": power}
        with (self.folder / "node-0.jsonl").open("a") as file:
            file.write(json.dumps({"time": self.now - self.behind, "node": "n0", "gpus": [gpu]}) + "\n")

    def hang_after(self, quiet: HangDetector, ranks: Callable[[int], Any], seconds: int = 4000) -> int | None:
        """Return after how many silent seconds it is a hang, None if it is none for so long."""
        for second in range(seconds):
            if quiet.look(ranks(second)):
                return second
            self.now += 1.0
        return None


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def idle_ranks(_second: int) -> dict[int, dict[str, Any]]:
    return {rank: {"cpu": 5.0, "moved": 1e9, "state": "S", "node": f"n{rank}"} for rank in range(4)}


def spinning_ranks(second: int) -> dict[int, dict[str, Any]]:
    return {rank: {"cpu": float(second), "state": "R", "node": f"n{rank}"} for rank in range(4)}


def stacks(line: int = 7, by: str = "py-spy") -> dict[int, dict[str, Any]]:
    frames = [{"function": "all_reduce", "file": "a.py", "line": line}]
    threads = [{"tid": 1, "frames": frames if by == "py-spy" else []}]
    return {rank: {"by": by, "moved": False, "threads": threads} for rank in range(4)}


# ---- silence, and what is asked for ----


def test_f45_silence_of_idle_ranks_is_a_hang(site: Site) -> None:
    quiet = site.quiet(20.0)
    for second in range(30):
        site.say()
        assert quiet.look({0: {"cpu": float(second)}}) is None
        site.now += 1.0
    assert site.hang_after(quiet, idle_ranks) in range(19, 23)


def test_f45_silence_of_computing_ranks_is_a_hang_only_after_a_longer_time(site: Site) -> None:
    site.say()
    assert site.hang_after(site.quiet(20.0), spinning_ranks) in range(60, 63)


def test_f45_single_computing_rank_delays_the_hang(site: Site) -> None:
    site.say()
    assert site.hang_after(
        site.quiet(20.0), lambda second: {**idle_ranks(second), 63: {"cpu": 0.5 * second}}
    ) in range(60, 63)


def test_f45_saving_rank_delays_the_hang(site: Site) -> None:
    site.say()
    saving = [{**idle_ranks(0), 0: {"cpu": 5.0, "moved": 1e9 + 1e6 * second}} for second in range(80)]
    assert site.hang_after(site.quiet(20.0), saving.__getitem__, 80) in range(60, 63)


def test_f45_stopped_rank_is_a_hang_although_other_ranks_compute(site: Site) -> None:
    site.say()
    stopped = [{**spinning_ranks(second), 1: {"state": "T", "node": "n1"}} for second in range(80)]
    quiet = site.quiet(20.0)
    assert site.hang_after(quiet, stopped.__getitem__, 80) in range(20, 23)
    result = quiet.look(stopped[79])
    assert result is not None
    assert (result.rank, result.node) == (1, "n1")


# ---- GPUs ----


@pytest.mark.parametrize(
    ("util", "power", "after"),
    [
        (0, 70.0, 20),  # idle: that is what was asked for, though the CPUs spin
        (100, 120.0, 20),  # waits in a collective, which draws little
        (100, 600.0, 60),  # works
    ],
)
def test_f45_working_gpus_delay_the_hang(site: Site, util: int, power: float, after: int) -> None:
    for _ in range(3):
        site.gpus(98, 650.0)
        site.now += 1.0
    site.say()
    quiet = site.quiet(20.0)

    def ranks(second: int) -> Any:
        site.gpus(util, power)
        return spinning_ranks(second)

    assert site.hang_after(quiet, ranks) in range(after, after + 4)


@pytest.mark.parametrize("behind", [100.0, -100.0])
def test_f66_working_gpus_delay_the_hang_with_any_node_clock(
    site: Site, tmp_path: Path, behind: float
) -> None:
    site.behind = behind
    beats = Heartbeats(str(tmp_path / "ranks"))
    (tmp_path / "ranks/beats").mkdir(parents=True)
    sign = {"kind": "beat", "node": "n0", "time": time.time() - behind}
    (tmp_path / "ranks/beats/n0.json").write_text(json.dumps(sign))
    beats.look()
    for _ in range(3):
        site.gpus(98, 650.0)
        site.now += 1.0
    site.say()
    quiet = site.quiet(20.0)
    quiet.watched_gpus.clocks = beats.clocks

    def ranks(second: int) -> Any:
        site.gpus(100, 600.0)
        return idle_ranks(second)

    assert site.hang_after(quiet, ranks) in range(60, 64)


def test_f45_busy_gpu_with_low_power_is_not_working(site: Site) -> None:
    for power in (650.0, 640.0):
        site.gpus(98, power)
        site.now += 1.0
    site.say()
    quiet = site.quiet(20.0)
    quiet.look(idle_ranks(0))
    for util, power, works in ((98, 600.0, True), (100, 120.0, False), (0, 70.0, False)):
        site.now += 30.0
        site.gpus(util, power)
        assert quiet.watched_gpus.at_work(quiet.since, site.now) is works
    site.now += 600.0  # the sampler has died
    assert quiet.watched_gpus.at_work(quiet.since, site.now) is None


# ---- stacks ----


def hang_time_with_stacks(site: Site, picture: Callable[[int], Any], seconds: int = 400) -> int | None:
    """Return when ranks that spin hang, if their stacks are looked at every ten seconds once wanted."""
    site.say()
    quiet = site.quiet(20.0)

    def ranks(second: int) -> Any:
        if second % 10 == 0 and quiet.wants_picture():
            quiet.see(picture(second))
        return spinning_ranks(second)

    return site.hang_after(quiet, ranks, seconds)


def test_f45_spinning_ranks_with_constant_stacks_are_a_hang(site: Site) -> None:
    assert hang_time_with_stacks(site, lambda _: stacks()) in range(40, 44)


def test_f45_changing_stacks_delay_the_hang(site: Site) -> None:
    assert hang_time_with_stacks(site, lambda second: stacks(line=second)) in range(60, 63)
    assert hang_time_with_stacks(site, lambda second: {**stacks(), 3: stacks(line=second)[3]}) in range(
        60, 63
    )


def test_f45_unknown_stacks_do_not_prove_a_hang(site: Site) -> None:
    assert hang_time_with_stacks(site, lambda _: stacks(by="proc")) in range(60, 63)
    assert hang_time_with_stacks(site, lambda _: {0: stacks()[0]}) in range(60, 63)  # of one rank of four


def test_stacks_written_to_a_log_are_not_activity(site: Site) -> None:
    def picture(_: int) -> Any:
        site.say()  # as faulthandler does
        return stacks()

    assert hang_time_with_stacks(site, picture) in range(40, 44)


def test_agent_sends_stacks_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"DTSLURM_RUN_DIR": str(tmp_path), "DTSLURM_ATTEMPT": "0", "SLURMD_NODENAME": "n1"}
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    rank = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], env={**os.environ, **env, "RANK": "3"}
    )
    try:
        (tmp_path / "ranks/0/beats").mkdir(parents=True)
        (tmp_path / "ranks/0/3.json").write_text(json.dumps({"pid": rank.pid}))
        watch, beats = NodeAgent(), Heartbeats(str(tmp_path / "ranks/0"))
        end = time.monotonic() + 60
        while not beats.ranks() and time.monotonic() < end:
            watch.beat()
            beats.look()
        watch.tell()
        assert not (tmp_path / "ranks/0/stacks").exists()  # nobody asked
        for number in (1, 2):
            beats.ask_stacks()
            assert beats.reported_stacks() == ({}, False)
            watch.tell()
            result, whole = beats.reported_stacks()
            assert (list(result), whole, beats.stack_requests) == ([3], True, number)
            assert result[3]["node"] == "n1"
        assert beats.ranks()[3]["moved"] > 0
    finally:
        rank.kill()
        rank.wait()
    assert bytes_of(rank.pid) == 0


# ---- what is learned ----


def test_f45_hang_time_is_learned_from_training_steps(site: Site) -> None:
    quiet = site.quiet(None)
    assert quiet.limit() == FIRST_S
    for _ in range(4):
        site.step()
        quiet.look({})
        site.now += 30.0
    assert quiet.limit() == 150.0
    assert site.hang_after(quiet, idle_ranks) in range(118, 123)  # 30 s were silent already


def test_f45_output_during_startup_does_not_shorten_the_hang_time(site: Site) -> None:
    quiet = site.quiet(None)
    for _ in range(5):
        site.say()
        quiet.look({})
        site.now += 1.0
    assert quiet.limit() == FIRST_S  # a model may now be loaded for minutes
    for _ in range(6):
        site.say()
        quiet.look({})
        site.now += 1.0
    assert quiet.limit() == 60.0


def test_f45_learned_pause_of_an_earlier_attempt_sets_the_hang_time(site: Site) -> None:
    quiet = site.quiet(None, longest=40.0)
    for _ in range(4):
        site.step()
        quiet.look({})
        site.now += 2.0
    assert quiet.limit() == 200.0


def test_f45_computing_ranks_have_the_first_time_limit_without_a_hang_timeout(site: Site) -> None:
    quiet = site.quiet(None)
    for _ in range(4):
        site.step()
        quiet.look({})
        site.now += 2.0
    assert site.hang_after(quiet, spinning_ranks) in range(int(FIRST_S) - 4, int(FIRST_S) + 4)


# ---- the odd one ----


def test_differing_rank_is_the_rank_that_waits_elsewhere() -> None:
    same = {"state": "S", "waits": "do_poll"}
    assert find_differing_rank({0: same, 1: same, 2: {"state": "S", "waits": "hrtimer_nanosleep"}}) == (
        2,
        "it is sleeping, the others are waiting for events",
    )
    stopped = find_differing_rank({0: same, 1: {"state": "T", "waits": "do_signal_stop"}})
    assert stopped is not None
    assert stopped[0] == 1
    assert find_differing_rank({0: same, 1: same}) is None
    assert find_differing_rank({0: same, 1: {"state": "R", "waits": "0"}}) is None


# ---- the training code or the node ----

TRAIN = "/home/me/train.py"
PYTHON = "/opt/env/lib/python3.11/"
TORCH = PYTHON + "site-packages/torch/"
LOADER = TORCH + "utils/data/dataloader.py"


def process_in(*files: str, waits: str = "", **more: Any) -> dict[str, Any]:
    """Return a process whose main thread is in these files, the innermost first."""
    frames = [{"function": "f", "file": name, "line": 7} for name in files]
    thread = {"state": "S", "waits": waits, "frames": frames}
    return {"state": "S", "threads": [thread, *more.pop("others", [])], **more}


@pytest.mark.parametrize(
    ("process", "is_own_wait"),
    [
        (process_in(TRAIN, waits="nanosleep (hrtimer_nanosleep)"), True),
        (process_in(TRAIN, waits="(hrtimer_nanosleep)"), True),
        (process_in(TRAIN, waits="select (do_select)"), True),  # time.sleep before Python 3.11
        (process_in(TRAIN, waits="futex (futex_wait_queue)"), False),  # perhaps loss.item()
        (process_in(TRAIN, waits="ioctl of /dev/nvidia0"), False),
        (process_in(TRAIN, waits="nanosleep", state="D"), False),
        (process_in(TRAIN, waits="nanosleep", state="T"), False),
        (process_in(TRAIN, waits="nanosleep", blocked=True), False),
        (process_in(PYTHON + "threading.py", PYTHON + "queue.py", TRAIN, waits="futex"), True),
        (process_in(PYTHON + "threading.py", TORCH + "distributed/c10d.py", TRAIN, waits="futex"), False),
        (process_in(PYTHON + "selectors.py", PYTHON + "multiprocessing/connection.py", LOADER, TRAIN), True),
        (process_in(PYTHON + "selectors.py", TRAIN), False),
        (process_in(PYTHON + "socket.py", TRAIN), False),
        (process_in(TORCH + "_tensor.py", TRAIN, waits="nanosleep"), False),
        (process_in(TORCH + "_tensor.py", waits="nanosleep"), False),
        (
            process_in(
                PYTHON + "threading.py", TRAIN, others=process_in(TORCH + "distributed/c.py")["threads"]
            ),
            False,
        ),
        (process_in(PYTHON + "threading.py", TRAIN, others=[{"state": "D", "frames": []}]), False),
        (process_in(waits="nanosleep"), False),
        ({"state": "S", "threads": []}, False),
        ({}, False),
    ],
)
def test_f45_only_waits_of_python_itself_are_waits_in_the_training_code(
    process: dict[str, Any], is_own_wait: bool
) -> None:
    assert waits_in_own_code(process) is is_own_wait
