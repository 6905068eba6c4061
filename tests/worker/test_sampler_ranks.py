"""The sampler's view of a node's ranks: real processes, sampled at times that the test chooses."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker import sampler_ranks
from dtslurm.worker.sampler_ranks import Family, Ranks
from tests.waiting import wait_until

START = 1000.0
SPIN = "while True: pass"


class Node:
    """A node with ranks of one attempt, and the sampler that looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("logs/0", "ranks/0", "metrics/0"):
            (folder / name).mkdir(parents=True)
        self.env = {"SLURM_NODEID": "2", "SLURMD_NODENAME": "n7"}
        self.started: list[subprocess.Popen[bytes]] = []
        self.sampler = Ranks(self.env, str(folder), "0", 2)

    def start(self, rank: int, code: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a rank's process, and record it as its script does."""
        result = {
            "DTSLURM_RUN_DIR": str(self.folder),
            "DTSLURM_ATTEMPT": "0",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        rank_env = {**os.environ, **self.env, **result, **env}
        if not rank_env["RANK"]:
            del rank_env["RANK"]
        process = subprocess.Popen([sys.executable, "-c", code], env=rank_env, start_new_session=True)
        self.started.append(process)
        record = {"rank": rank, "host": "n7", "pid": process.pid, "ended": None}
        (self.folder / f"ranks/0/{rank}.json").write_text(json.dumps(record))
        wait_until(lambda: str(self.folder).encode() in Path(f"/proc/{process.pid}/environ").read_bytes())
        return process

    def say(self, rank: int, text: str = "step\n") -> None:
        with (self.folder / f"logs/0/rank-{rank}.log").open("a") as file:
            file.write(text)

    def look(self, now: float, gpus: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
        return self.sampler.look(now, list(gpus))

    def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Look each tenth of a second, as long as it takes, and return what was seen."""
        seen: dict[str, Any] = {}

        def found() -> bool:
            time.sleep(0.1)
            seen.update(self.look(time.time()))
            return bool(condition(seen))

        wait_until(found)
        return seen

    @property
    def file(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "metrics/0/activity-2.json").read_text())
        return result


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_ranks_sampler_reports_nothing_before_a_rank_starts(node: Node) -> None:
    assert node.look(START) == {}
    node.sampler.note(START, [])
    assert not (node.folder / "metrics/0/activity-2.json").exists()


def test_only_ranks_of_this_attempt_and_node_count(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)")
    node.start(1, "import time; time.sleep(600)", SLURM_NODEID="3")
    node.start(4, "import time; time.sleep(600)", DTSLURM_ATTEMPT="1")
    result = node.look(START)
    assert (result["ranks"], result["seen"], result["world_size"], result["node"]) == ([0], [0], 2, "n7")


def test_single_process_without_a_rank_number_counts_as_rank_0(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)", RANK="", WORLD_SIZE="")
    result = node.look(START)
    assert (result["ranks"], result["world_size"]) == ([0], None)


def test_launcher_without_a_rank_number_is_not_counted_beside_its_ranks(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)", RANK="")
    node.start(3, "import time; time.sleep(600)")
    assert node.look(START)["ranks"] == [3]


def test_ray_driver_is_not_sampled(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)", RANK="", RAY_USAGE_STATS_ENABLED="0")
    assert node.look(START) == {}


def test_sleeping_rank_shows_no_activity(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)")
    node.look(START)
    result = node.look(START + 100)
    assert {result[kind] for kind in ("output", "cpu", "children", "io", "gpu")} == {START}
    assert result["waits"] == {}


def test_computing_rank_shows_cpu_activity(node: Node) -> None:
    node.start(0, SPIN)
    first = node.until(lambda seen: seen)
    seen = node.until(lambda seen: seen["cpu"] > first["time"] + 0.05)
    assert seen["children"] <= first["time"] + 0.05


def test_child_work_is_counted_separately_and_the_busiest_child_is_named(node: Node, tmp_path: Path) -> None:
    compiler = tmp_path / "cc1plus"
    compiler.symlink_to(sys.executable)
    inner = shlex.join([str(compiler), "-c", SPIN])
    node.start(0, f"import subprocess; subprocess.run(['sh', '-c', {inner + '; true'!r}])")
    seen = node.until(lambda seen: seen.get("waits") == {"0": ["child", "cc1plus"]})
    assert seen["children"] == pytest.approx(seen["time"], abs=0.01)


def test_children_that_end_between_two_samples_count_as_work(node: Node, tmp_path: Path) -> None:
    child = "import time\nwhile time.process_time() < 0.6: pass"
    go = tmp_path / "go"
    wait = f"import os, subprocess, sys, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    end = f"\nopen({str(tmp_path / 'done')!r}, 'w')\ntime.sleep(600)"
    node.start(0, f"{wait}subprocess.run([sys.executable, '-c', {child!r}]){end}")
    node.look(START)
    go.touch()
    wait_until((tmp_path / "done").exists)
    assert node.look(START + 4)["children"] == START + 4


def test_rank_that_waits_for_an_idle_child_names_the_child(node: Node) -> None:
    node.start(0, "import subprocess; subprocess.run(['sleep', '600'])")
    seen = node.until(lambda seen: seen.get("waits") == {"0": ["child", "sleep"]})
    later = node.look(seen["time"] + 100)
    assert later["children"] < later["time"]


def test_stopped_rank_is_reported(node: Node) -> None:
    process = node.start(1, "import time; time.sleep(600)")
    process.send_signal(signal.SIGSTOP)
    node.until(lambda seen: seen.get("waits") == {"1": ["stopped", ""]})


def test_reading_and_writing_counts_as_io_activity(node: Node) -> None:
    node.start(0, "import time\nwhile True: open('/dev/zero', 'rb').read(1 << 20); time.sleep(0.02)")
    first = node.until(lambda seen: seen)
    node.until(lambda seen: seen["io"] > first["time"] + 0.05)


def test_pauses_are_learned_after_three_training_steps(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)")
    node.look(START)
    moments = [
        (5, True),
        (10, False),
        (40, True),
        (45, True),
        (50, True),
        (55, False),
        (75, False),
        (80, True),
    ]
    for at, steps in moments:
        if steps:
            with (node.folder / "metrics/0/train.jsonl").open("a") as file:
                file.write("{}\n")
        result = node.look(START + at)
        assert result["learned"] == (at >= 50)
    assert (result["longest"], result["output"]) == (25.0, START + 80)  # that of 35 s was before training


def test_output_alone_marks_the_start_of_training_only_after_a_delay(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)")
    learned = []
    for at in range(12):
        node.say(0)
        learned.append(node.look(START + 5 * at)["learned"])
    assert learned == [False] * 10 + [True] * 2


@pytest.mark.parametrize(
    ("util", "power", "works"),
    [(95.0, 400.0, True), (95.0, 120.0, False), (2.0, 400.0, False), (95.0, None, True)],
)
def test_gpu_with_low_power_does_not_count_as_working(
    node: Node, util: float, power: float | None, works: bool
) -> None:
    node.start(0, "import time; time.sleep(600)")
    node.look(START, ({"index": 0, "util": 90.0, "power_w": 500.0},))
    gpu = {"index": 0, "util": util, **({"power_w": power} if power is not None else {})}
    assert (node.look(START + 50, (gpu,))["gpu"] == START + 50) == works


def test_activity_file_is_replaced_each_minute_and_at_each_sample_of_a_pause(node: Node) -> None:
    node.start(0, "import time; time.sleep(600)")
    written = []
    for at in range(0, 200, 5):
        if at <= 100 or at == 180:
            node.say(0)
        node.sampler.note(START + at, [])
        if node.file["time"] == START + at:
            written.append(at)
    assert written == [0, 60, 120, *range(145, 185, 5)]
    assert [path.name for path in (node.folder / "metrics/0").iterdir()] == ["activity-2.json"]


def test_large_job_replaces_the_activity_file_every_two_minutes_without_reading_logs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.sampler = Ranks({**node.env, "SLURM_NNODES": "100"}, str(node.folder), "0", 2)
    log = node.folder / "output"
    with log.open("a") as output, contextlib.redirect_stdout(output):
        monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, stdout=output))
        node.start(0, "import sys, time; sys.stdin.readline() or time.sleep(600)")
    written, grown = [], []
    for at in range(0, 400, 5):
        if at == 200:
            with log.open("a") as file:  # of another program: no output of the rank
                file.write("text")
        node.sampler.note(START + at, [])
        if node.file["time"] == START + at:
            written.append(at)
            grown.append(node.file["output"])
    assert written == [0, 60, 180, 300]
    assert set(grown) == {START}


def test_output_of_a_rank_in_a_large_job_is_detected_without_its_log(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.sampler = Ranks({**node.env, "SLURM_NNODES": "100"}, str(node.folder), "0", 2)
    with (tmp_path / "output").open("a") as output:
        monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, stdout=output))
        node.start(0, "import time\nwhile True: print('step', flush=True); time.sleep(0.2)")
    first = node.until(lambda record: record.get("output"))["output"]
    assert node.until(lambda record: record["output"] > first + 1.0)


def test_activity_file_is_marked_over_when_all_ranks_of_the_node_have_ended(node: Node) -> None:
    process = node.start(0, "import time; time.sleep(600)")
    node.sampler.note(START, [])
    node.sampler.end(START + 5)
    assert "over" not in node.file  # another rank of the node goes on
    process.kill()
    process.wait()
    node.sampler.end(START + 6)
    assert (node.file["over"], node.file["ranks"], node.file["seen"]) == (True, [], [0])


# ---- Thresholds ----


def stat_fields(parent: int = 1, own: int = 0, reaped: int = 0, start: str = "5") -> list[str]:
    """Return a process's stat fields with these CPU seconds, each half in the kernel."""
    ticks = [int(seconds * sampler_ranks.TICK) // 2 for seconds in (own, own, reaped, reaped)]
    return ["S", str(parent), *["0"] * 9, *map(str, ticks), *["0"] * 4, start]


def test_family_of_a_rank_sums_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_ranks, "bytes_of", lambda pid: pid * 100.0)
    table = {
        7: stat_fields(own=2, reaped=4),
        8: stat_fields(7, own=6, reaped=8, start="9"),
        9: stat_fields(8, own=10, reaped=12),
        10: stat_fields(own=50, reaped=60),
    }
    assert sampler_ranks.family(7, table, {7: [8], 8: [9], 1: [7, 10]}) == Family(
        2.0, {(8, "9"): 6.0, (9, "5"): 10.0}, 24.0, {7: 700.0, 8: 800.0, 9: 900.0}
    )


WORKER = (8, "5")
IDLE = Family(10.0, {WORKER: 3.0}, 1.0, {7: 1e6, 8: 1e6})


@pytest.mark.parametrize(
    ("later", "kinds", "waits"),
    [
        (IDLE, set(), {}),
        (IDLE._replace(own=11.0), {"cpu"}, {}),  # a tenth of a CPU
        (IDLE._replace(own=10.9), set(), {}),
        (IDLE._replace(below={WORKER: 4.0}), {"children"}, {"3": ("child", "worker-8")}),
        (IDLE._replace(below={WORKER: 3.9}), set(), {}),
        (IDLE._replace(below={WORKER: 3.5, (9, "6"): 1.5}), {"children"}, {"3": ("child", "worker-9")}),
        (IDLE._replace(below={}, reaped=5.0), {"children"}, {"3": ("child", "worker-0")}),
        (IDLE._replace(below={}, reaped=4.5), set(), {}),
        (IDLE._replace(moved={7: 1.5e6, 8: 1.5e6}), {"io"}, {}),
        (IDLE._replace(moved={7: 1.5e6, 8: 1.4e6}), set(), {}),
        (IDLE._replace(moved={7: 2e6, 8: 0.0}), {"io"}, {}),  # another process has the pid
        (IDLE._replace(moved={7: 1e6, 8: 1e6, 9: 1e6}), {"io"}, {}),
        (IDLE._replace(own=9.0), set(sampler_ranks.KINDS), {}),  # the rank has restarted
    ],
)
def test_work_of_a_rank_is_measured_between_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Family, kinds: set[str], waits: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampler_ranks, "name_of", lambda pid: f"worker-{pid}")
    ranks = Ranks({}, str(tmp_path), "0", 0)
    ranks.before = 100.0, {3: IDLE}
    ranks.last = dict.fromkeys(sampler_ranks.KINDS, 100.0)
    assert ranks.work({3: later}, 110.0) == waits
    assert {kind for kind, seen_at in ranks.last.items() if seen_at == 110.0} == kinds
    ranks.work({4: IDLE}, 111.0)  # a rank that has just started
    assert ranks.last == dict.fromkeys(sampler_ranks.KINDS, 111.0)


def test_gpu_computes_at_half_of_its_largest_power_so_far(tmp_path: Path) -> None:
    ranks = Ranks({}, str(tmp_path), "0", 0)
    samples: list[tuple[dict[str, Any], bool]] = [
        ({"index": 0, "util": 5.0}, True),
        ({"index": 0, "util": 4.9}, False),
        ({"index": 0}, False),
        ({"index": 0, "util": 100.0, "power_w": 300.0}, True),
        ({"index": 0, "util": 100.0, "power_w": 150.0}, True),
        ({"index": 0, "util": 100.0, "power_w": 149.0}, False),
        ({"index": 0, "util": 0.0, "power_w": 400.0}, False),
        ({"index": 0, "util": 100.0, "power_w": 199.0}, False),
        ({"index": 1, "util": 100.0, "power_w": 60.0}, True),
    ]
    assert [ranks.gpus_work([gpu]) for gpu, _ in samples] == [computes for _, computes in samples]
    assert ranks.gpus_work([samples[0][0], samples[1][0]])
    assert not ranks.gpus_work([])


@pytest.mark.parametrize(
    ("state", "children", "channel", "expected"),
    [
        ("T", [8], "do_wait", ("stopped", "")),
        ("t", [], "", ("stopped", "")),
        ("D", [8], "do_wait", ("blocked", "")),
        ("S", [8, 9], "do_wait", ("child", "worker-9")),
        ("S", [8], "kernel_wait4", ("child", "worker-8")),
        ("S", [8], "futex_wait", ("", "")),
        ("S", [], "do_wait", ("", "")),
    ],
)
def test_reason_that_a_rank_waits_is_that_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, state: str, children: list[int], channel: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(sampler_ranks, "name_of", lambda pid: f"worker-{pid}")
    monkeypatch.setattr(sampler_ranks, "contents", {"/proc/7/wchan": channel}.__getitem__)
    assert sampler_ranks.waits_for(7, state, children) == expected


def test_bytes_and_name_of_a_process_are_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/7/io": "rchar: 10\nwchar: 200\nsyscr: 5\nread_bytes: 4000\n",
        "/proc/7/comm": "my prog/1:é" + "x" * 40,
    }
    monkeypatch.setattr(sampler_ranks, "contents", lambda path: texts.get(path, ""))
    assert (sampler_ranks.bytes_of(7), sampler_ranks.bytes_of(8)) == (210.0, 0.0)
    assert sampler_ranks.name_of(7) == "my_prog_1_é" + "x" * 21
