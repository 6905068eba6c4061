"""How costs grow: `discover` to 10,000 nodes, `status` and `top` to 30,000 jobs, logs of 30,000 files.

``python -m benchmarks.scale [--most N] [--only nodes|jobs|files]`` brings up a Slurm of its own, whose nodes
but one are in slurm.conf alone and whose jobs wait for ever, each with a record of its own in the controller.
Beside each: what Slurm's own command takes for the same. The exponent is that of the last decade of sizes;
what failed is named with the size at which it did. A picture of the whole goes to `docs/scale.svg`.
``--most 100000`` goes on to 100,000 jobs and files.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.scale.growth import Curve, picture
from benchmarks.scale.lab import ARRAY, ScaleLab
from dtslurm.errors import DtslurmError
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark
from dtslurm.slurm import commands
from dtslurm.transport.connect import connect
from tests.lab.cluster import LabError

ROOT = Path(__file__).parents[2]
DTSLURM = [sys.executable, "-m", "dtslurm"]
NODES = (100, 1_000, 10_000)
JOBS = (1_000, 3_000, 10_000, 30_000, 100_000)
FILES = (1_000, 3_000, 10_000, 30_000, 100_000)
NODES_OF_JOBS = 10_000
QUEUE = "sbatch and scontrol, s for 1,000 more"
CAUGHT_UP = "until every file's line is here, s"
MOST = 30_000
ROUNDS = 3
LONGEST_S = 120.0
IDLE_S = 6.0
Panel = tuple[str, list[Curve]]
BREAKS = (OSError, RuntimeError, subprocess.SubprocessError, DtslurmError, LabError, psutil.Error)


class Costs:
    """Costs by name and size; what failed is told once and not tried again at larger sizes."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.broken: dict[str, str] = {}

    def note(self, name: str, size: int, work: Callable[[], float]) -> None:
        """Note the cost of some work at a size."""
        if name in self.broken:
            return
        try:
            cost = work()
        except BREAKS as error:
            said = str(getattr(error, "stderr", None) or error)
            self.broken[name] = f"{name} broke at {size:,}: {said.strip()[-300:]}"
            print(f"  {self.broken[name]}", flush=True)
            return
        self._found[name].append((size, cost))
        print(f"  {size:>8,} {name:44} {cost:9.3f}", flush=True)

    def panel(self) -> Panel:
        """Return the curves, and print their exponents."""
        curves = [Curve(name, tuple(points)) for name, points in self._found.items()]
        for curve in curves:
            grows = "-" if curve.exponent is None else f"{curve.exponent:.2f}"
            print(f"  cost ~ n^{grows:5} {curve.name}")
        print(flush=True)
        return self.title, curves


def seconds(argv: Sequence[str], env: Mapping[str, str], rounds: int = ROUNDS, verdict: int = 0) -> float:
    """Return the median of the seconds of CPU that a command takes; an error if it fails.

    The clock's seconds tell more of what else the machine does; the controller's own are not in it.
    """
    took = []
    for _ in range(rounds):
        before, begin = _children(), time.monotonic()
        done = subprocess.run(
            list(argv), env=dict(env), check=False, timeout=LONGEST_S, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode not in (0, verdict):
            raise subprocess.CalledProcessError(done.returncode, argv[0], stderr=done.stderr)
        took.append(_children() - before)
        if time.monotonic() - begin > 20:
            break
    return statistics.median(took)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def user_of(lab: ScaleLab, folder: Path) -> dict[str, str]:
    """Return the environment of a user with folders of his own."""
    own = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "DTSLURM_CLUSTER": "slurm", "PYTHONPATH": str(ROOT)}
    own |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    return {**lab.environ(), **own}


def nodes(most: int) -> Panel:
    """Measure what describing a cluster costs by its nodes."""
    costs = Costs("cluster discover and check: seconds of CPU by nodes")
    print(costs.title)
    for size in (size for size in NODES if size <= most):
        with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name:
            lab = ScaleLab(Path(name) / "lab", size)
            with lab:
                describe(costs, size, user_of(lab, Path(name) / "user"), f"{name}/found.yaml")
    return costs.panel()


def describe(costs: Costs, size: int, env: Mapping[str, str], profile: str) -> None:
    """Measure the commands that describe a cluster of so many nodes, and the listing that they read."""
    discover = [*DTSLURM, "cluster", "discover", "--no-probe", "-o", profile, "--yes"]
    check = [*DTSLURM, "cluster", "check", profile, "--no-probe", "-l", "srun"]
    costs.note("dtslurm cluster discover --no-probe", size, lambda: seconds(discover, env))
    costs.note("dtslurm cluster check --no-probe", size, lambda: seconds(check, env, verdict=1))
    costs.note("scontrol show node", size, lambda: seconds(commands.show_nodes(), env))


def jobs(most: int) -> Panel:
    """Measure what looking at one's runs costs by the jobs in them, with 10,000 nodes."""
    costs = Costs(f"status and top: seconds of CPU by own jobs ({NODES_OF_JOBS:,} nodes)")
    print(costs.title)
    with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name:
        folder = Path(name) / "user"
        lab = ScaleLab(Path(name) / "lab", NODES_OF_JOBS)
        with lab:
            env = user_of(lab, folder)
            queued = 0
            for size in (size for size in JOBS if size <= most):

                def queue(more: int = size - queued) -> float:
                    begin = time.monotonic()
                    for _ in range(more // ARRAY):
                        lab.queue_run(folder)
                    return (time.monotonic() - begin) / more * 1000

                costs.note(QUEUE, size, queue)
                if QUEUE in costs.broken:
                    break
                queued = size
                looks(costs, size, env, folder)
    return costs.panel()


def looks(costs: Costs, size: int, env: Mapping[str, str], folder: Path) -> None:
    """Measure each way to look, with so many jobs in the queue."""
    runs = str(size // ARRAY)

    def fresh(words: Sequence[str]) -> float:
        def once() -> float:
            for path in (folder / "CACHE" / "dtslurm" / "queues").glob("*"):
                path.unlink()
            return seconds(words, env, 1)

        return statistics.median(once() for _ in range(ROUNDS))

    status = [*DTSLURM, "status", "-n", runs]
    costs.note("dtslurm status", size, lambda: fresh(status))
    costs.note("dtslurm status, heard before", size, lambda: seconds(status, env))
    costs.note("dtslurm top --once", size, lambda: fresh([*DTSLURM, "top", "--once"]))
    costs.note("squeue --me, the same columns", size, lambda: seconds(commands.squeue(), env))


def files(most: int) -> Panel:
    """Measure what following a run's logs costs by its files."""
    costs = Costs("following logs: cost by files")
    print(costs.title)
    for size in (size for size in FILES if size <= most):
        with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name:
            logs = Path(name) / "logs" / "0"
            logs.mkdir(parents=True)
            for rank in range(size):
                (logs / f"rank-{rank}.log").write_bytes(b"one line\n")
            follow(costs, size, Path(name))
        if CAUGHT_UP in costs.broken:
            break
    return costs.panel()


def follow(costs: Costs, size: int, run: Path) -> None:
    """Measure a follower: until it has all, and what it costs while nothing happens."""
    with LogStream(connect(None), LogRequest(str(run))) as stream:
        costs.note(CAUGHT_UP, size, lambda: caught_up(stream))
        if CAUGHT_UP in costs.broken:
            return
        family = psutil.Process().children(recursive=True)
        far = next(item for item in family if "-S" in item.cmdline())
        costs.note("far side, idle, % of a core", size, lambda: idle_share(stream, far))
        costs.note("far side, MB", size, lambda: far.memory_info().rss / 1e6)
        costs.note("far side, open files", size, lambda: float(far.num_fds()))


def caught_up(stream: LogStream) -> float:
    """Return the seconds until all that is in the files was read."""
    begin = time.monotonic()
    while Mark.CAUGHT_UP not in stream.read(1.0):
        if time.monotonic() > begin + LONGEST_S:
            raise TimeoutError(f"not caught up after {LONGEST_S:g} s")
    return time.monotonic() - begin


def idle_share(stream: LogStream, far: psutil.Process) -> float:
    """Return the percentage of a core that the far side takes while the files stay as they are."""

    def wait(span: float) -> None:
        end = time.monotonic() + span
        while time.monotonic() < end:
            stream.read(0.5)

    wait(8.0)  # new files count as active for a while
    before, begin = sum(far.cpu_times()[:2]), time.monotonic()
    wait(IDLE_S)
    return 100 * (sum(far.cpu_times()[:2]) - before) / (time.monotonic() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("--only", choices=["nodes", "jobs", "files"])
    chosen = parser.parse_args()
    ways = {"nodes": nodes, "jobs": jobs, "files": files}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    print(f"load {os.getloadavg()[0]:.1f}, at most {limit:,} open files a process; medians of {ROUNDS}\n")
    panels = [way(chosen.most) for name, way in ways.items() if chosen.only in {None, name}]
    if chosen.only is None and chosen.most >= MOST:
        (ROOT / "docs" / "scale.svg").write_text(picture(panels))


if __name__ == "__main__":
    main()
