"""``python -m tests.nemesis [--seeds FIRST-LAST,...]``: random schedules of faults on a real Slurm.

Prints a line for each schedule. The history and the logs of a schedule that fails are in ``build/nemesis``.
``--seed N`` runs one schedule again, ``--show`` prints its content.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import robustness
from tests.lab.cluster import LabError
from tests.nemesis.checker import check
from tests.nemesis.history import Event, dump
from tests.nemesis.schedule import ARRAYS, ROLES, Schedule, make
from tests.nemesis.site import Site, site
from tests.nemesis.workload import Workload

ROOT = Path(__file__).parents[2]
HISTORIES = ROOT / "build" / "nemesis"
SHARE = 20  # schedules, of both kinds of clusters


@dataclass
class Result:
    """The result of one schedule."""

    seed: int
    faults: list[str]
    runs: int
    bodies: int
    looks: int
    seconds: float
    states: dict[str, int]
    violations: list[list[str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    by_hand: int = 0


def main() -> int:
    """Run schedules; return 1 if one has a violation or an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis", description=__doc__)
    parser.add_argument("--seeds", default="1-350,2000-2099,4000-4049", help="such as 1-350,2000-2099")
    parser.add_argument("--seed", type=int, help="only this schedule")
    parser.add_argument("--lanes", type=int, default=2, help="number of clusters at the same time")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no schedule after this time")
    parser.add_argument("--show", action="store_true", help="print the schedules and run none")
    parser.add_argument("--record", action="store_true", help="write the results for the documentation")
    parser.add_argument("--add", action="store_true", help="add the results to those recorded before")
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else _parse_ranges(args.seeds)
    if args.show:
        for seed in seeds:
            print(json.dumps(asdict(make(seed)), indent=1))
        return 0
    deadline = time.time() + args.seconds
    if args.lane or len(seeds) == 1:
        chosen = [int(seed) for seed in args.lane.split(",")] if args.lane else seeds
        results = list(_print_results(live_all(chosen, deadline)))
    else:
        results = _lanes(seeds, args.lanes, args.seconds)
        _summary(results)
        if args.record:
            name = "nemesis-roles" if ROLES <= seeds[0] < ARRAYS else "nemesis"  # each has its own table
            record(name, results, robustness.read().get(name, {}) if args.add else {})
    return int(any(result.violations or result.errors for result in results))


def _parse_ranges(text: str) -> list[int]:
    """Return the numbers of ranges such as ``1-350,2000-2099``."""
    seeds: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def live_all(seeds: Sequence[int], deadline: float = float("inf")) -> Iterator[Result]:
    """Run schedules one after another, on as few clusters as possible."""
    for first in range(0, len(seeds), SHARE):
        for networked in (False, True):
            plans = [make(seed) for seed in seeds[first : first + SHARE]]
            yield from _live_on([plan for plan in plans if plan.networked is networked], networked, deadline)


def _live_on(waiting: list[Schedule], networked: bool, deadline: float) -> Iterator[Result]:
    while waiting and time.time() < deadline:
        with site(networked=networked) as place:
            while waiting and time.time() < deadline:
                yield live(place, waiting.pop(0))
                try:
                    place.reset()
                except LabError:  # another cluster, then
                    break


def live(place: Site, plan: Schedule) -> Result:
    """Run one schedule and check its history."""
    begin = time.time()
    work = Workload(place, plan)
    events = work.live()
    violations = [list(item) for item in check(events)]
    errors = [*work.errors, *work.nemesis.trouble]
    if violations or errors:
        _keep(place, plan, events)
    return Result(
        seed=plan.seed,
        faults=[f"{fault.kind} {fault.target}" for fault in plan.faults],
        runs=len(plan.runs),
        bodies=sum(event.what == "begin" for event in events),
        looks=sum(event.what == "seen" for event in events),
        seconds=round(time.time() - begin, 1),
        states=dict(Counter(event.get("state") for event in events if event.what == "final")),
        violations=violations,
        errors=errors,
        by_hand=len(work.by_hand),
    )


def _keep(place: Site, plan: Schedule, events: Sequence[Event]) -> None:
    """Save the evidence of a violation: the history, the run directories and the logs of daemons."""
    kept = HISTORIES / str(plan.seed)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    dump(events, kept / "history.jsonl")
    for folder in (place.disk / "runs").glob(f"s{plan.seed}-*"):
        shutil.copytree(folder, kept / folder.name, symlinks=True)
    for log in (place.lab.root / "log").glob("*.log"):
        shutil.copy(log, kept)


def _print_results(results: Iterator[Result]) -> Iterator[Result]:
    for result in results:
        print(json.dumps(asdict(result)), flush=True)
        yield result


def _lanes(seeds: Sequence[int], lanes: int, seconds: float) -> list[Result]:
    """Run the schedules in several processes at the same time, each with its own clusters."""
    shares = [seeds[lane::lanes] for lane in range(lanes)]
    with ThreadPoolExecutor(lanes) as pool:
        answer = list(pool.map(lambda share: _lane(share, seconds), [share for share in shares if share]))
    return sorted((item for share in answer for item in share), key=lambda result: result.seed)


def _lane(seeds: Sequence[int], seconds: float) -> list[Result]:
    argv = [sys.executable, "-m", "tests.nemesis", "--lane", ",".join(map(str, seeds))]
    argv += ["--seconds", str(seconds)]
    results = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as lane:
        for line in lane.stdout or ():
            result = Result(**json.loads(line))
            results.append(result)
            print(in_words(result), flush=True)
    return results


def record(name: str, results: Sequence[Result], before: Mapping[str, Any]) -> None:
    """Write the results of these schedules, and of those recorded before, for the documentation.

    Args:
        name: the key of the results in the file of the documentation.
    """
    ends, faults = Counter[str](before.get("ends", {})), Counter[str](before.get("faults", {}))
    for result in results:
        ends.update(result.states)
        faults.update(word.split()[0] for word in result.faults)
    sums = {kind: sum(getattr(result, kind) for result in results) for kind in ("looks", "by_hand")}
    sums["attempts"] = sum(result.bodies for result in results)
    lists: dict[str, list[Any]] = {
        "seeds": [result.seed for result in results],
        "violations": [[result.seed, *words] for result in results for words in result.violations],
        "errors": [[result.seed, words.partition("\n")[0]] for result in results for words in result.errors],
    }
    robustness.write(
        name,
        {
            **{kind: [*before.get(kind, []), *values] for kind, values in lists.items()},
            **{kind: before.get(kind, 0) + value for kind, value in sums.items()},
            "runs": sum(ends.values()),
            "ends": dict(ends.most_common()),
            "faults": dict(sorted(faults.items())),
        },
        before.get("seconds", 0) + sum(result.seconds for result in results),
    )


def in_words(result: Result) -> str:
    """Return the line that is printed about a schedule."""
    faults = ", ".join(result.faults)
    ends = ", ".join(f"{number} {state}" for state, number in sorted(result.states.items()))
    text = f"seed {result.seed:<5} {result.seconds:5.1f} s  {result.runs} runs, {ends}; {faults}"
    wrong = [f"  {kind}: {run}: {words}" for kind, run, words in result.violations]
    return "\n".join([text, *wrong, *(f"  error: {error}" for error in result.errors)])


def _summary(results: Sequence[Result]) -> None:
    kinds = Counter(kind for result in results for kind, _, _ in result.violations)
    total = Counter[str]()
    for result in results:
        total.update(result.states)
    print(f"{len(results)} schedules, {sum(total.values())} runs: {dict(total)}; violations: {dict(kinds)}")


if __name__ == "__main__":
    sys.exit(main())
