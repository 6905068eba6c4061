"""Operations of one attempt on the shared file system, by the job's nodes.

``python -m benchmarks.scale.attempt`` submits jobs of 2, 4 and 8 nodes to the embedded scheduler, which
emulates nodes on this machine. Everything else is real: the batch script, the supervisor, the node agents,
the samplers and the shells around the ranks. The ranks print two lines and sleep. strace counts the system
calls whose path is below the run directory. The counts of larger jobs are extrapolated by a straight line
through the three sizes, and the largest deviation from that line is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RANKS_PER_NODE = 8
MEASURED_NODES = (2, 4, 8)
REPORTED_NODES = (8, 128, 1_250, 12_500)
TRAINING_S = 155
SETTLED_S, IDLE_S = 10.0, 120.0  # the samplers of a large job write every two minutes
PHASES = ("start", "idle minute", "end")
OPERATIONS = ("create", "open", "stat", "rename", "unlink", "readdir", "mkdir", "write")
ROLES = ("supervisor", "preflight", "agents", "samplers", "ranks and steps")
_ROLE_OF_MODE = {"node": "agents", "collect": "agents", "preflight": "preflight"}
FILES = "files"
TRACED = "%file,write,pwrite64,writev,getdents64"
_LINE = re.compile(r"^(?P<pid>\d+) +(?P<time>\d+\.\d+) (?P<call>\w+)\((?P<arguments>.*)")
_FD_PATH = re.compile(r"^(?:AT_FDCWD|\d+)<([^>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_RANK_RECORD = re.compile(r"/(?:ranks/0|dtslurm-[^/]+)/\d+\.json$")  # of a large job in a folder of the node
_KINDS = {
    "newfstatat": "stat", "stat": "stat", "lstat": "stat", "statx": "stat", "access": "stat",
    "faccessat": "stat", "faccessat2": "stat", "readlink": "stat", "readlinkat": "stat", "statfs": "stat",
    "rename": "rename", "renameat": "rename", "renameat2": "rename", "unlink": "unlink", "unlinkat": "unlink",
    "rmdir": "unlink", "mkdir": "mkdir", "mkdirat": "mkdir", "symlinkat": "create", "symlink": "create",
    "getdents64": "readdir", "write": "write", "pwrite64": "write", "writev": "write", "execve": "open",
}  # fmt: skip


@dataclass(frozen=True)
class FileOperation:
    """One system call on a file of the run directory.

    Attributes:
        kind: a name in `OPERATIONS`.
        role: a name in `ROLES`.
        path: the first path of the call; of a rename, the new name.
    """

    time: float
    kind: str
    role: str
    path: str


@dataclass
class TraceReader:
    """Reads the lines of strace into the operations below a folder, each with the role of its process.

    Attributes:
        roles: of the processes.
        record_times: when each rank's record was renamed.
    """

    folder: str
    roles: dict[str, str] = field(default_factory=dict)
    record_times: dict[str, list[float]] = field(default_factory=dict)

    def operations(self, lines: Iterable[str]) -> Iterator[FileOperation]:
        """Return the operations, in the order of their beginnings."""
        for line in lines:
            match = _LINE.match(line)
            if match is None:  # the end of a call that an earlier line began
                continue
            pid, call, arguments = match["pid"], match["call"], match["arguments"]
            if call == "execve":
                self.roles[pid] = role_of(arguments)
            path = path_of(call, arguments)
            kind = kind_of(call, arguments)
            if kind == "rename" and _RANK_RECORD.search(path):
                self.record_times.setdefault(path, []).append(float(match["time"]))
            if not path.startswith(self.folder + "/"):
                continue
            if kind:
                role = self.roles.get(pid, ROLES[-1])
                yield FileOperation(float(match["time"]), kind, role, path)


def role_of(arguments: str) -> str:
    """Return the role of a process from the arguments of its execve."""
    words = _QUOTED.findall(arguments)[1:]
    program = next((number for number, word in enumerate(words) if word.endswith("/supervisor")), None)
    if program is not None and "python" in words[0]:
        return _ROLE_OF_MODE.get((*words[program + 1 :], "")[0], "supervisor")
    return "samplers" if any(word.endswith("/sampler.py") for word in words) else ROLES[-1]


def path_of(call: str, arguments: str) -> str:
    """Return the absolute path that a call is about, empty if there is none."""
    folder = _FD_PATH.match(arguments)
    if call in {"write", "pwrite64", "writev", "getdents64"}:
        return folder.group(1) if folder else ""
    names = _QUOTED.findall(arguments)
    if not names or not names[0]:
        return ""
    name = names[1] if call.startswith(("rename", "symlink")) and len(names) > 1 else names[0]
    return name if name.startswith("/") or not folder else str(Path(folder.group(1), name))


def kind_of(call: str, arguments: str) -> str:
    """Return the kind of a call, empty for a call that does not count."""
    if call in {"open", "openat", "creat"}:
        return "create" if "O_CREAT" in arguments or call == "creat" else "open"
    return _KINDS.get(call, "")


@dataclass(frozen=True)
class AttemptCounts:
    """The operations of one attempt.

    Attributes:
        cells: how many there were, by phase, role and kind; in the idle minute the mean of two minutes.
        files: the number of files and folders in the run directory that the job created.
    """

    cells: Mapping[tuple[str, str, str], float]
    files: int


def measure_attempt(nodes: int, folder: Path, variables: Mapping[str, str]) -> AttemptCounts:
    """Run a job of so many nodes under strace, and count its operations."""
    script, trace = folder / "train.sh", folder / "trace"
    script.write_text(f'#!/bin/bash\necho "begin $RANK"\nsleep {TRAINING_S}\necho end\n')
    script.chmod(0o755)
    (folder / "home").mkdir()
    env = {**os.environ, "HOME": str(folder / "home")}
    env |= {"DTSLURM_RUN_ROOT": str(folder / "runs"), "DTSLURM_LOCAL_STATE": str(folder / "local")}
    strace = [
        "strace",
        "-f",
        "-qq",
        "-y",
        "-ttt",
        "--seccomp-bpf",
        "-e",
        f"trace={TRACED}",
        "-e",
        "signal=none",
    ]
    submit = [sys.executable, "-m", "dtslurm", "submit", "--cluster", "local", "-l", "srun", "-t", "20"]
    shape = ["-N", str(nodes), "--ntasks-per-node", str(RANKS_PER_NODE), "--max-restarts", "1"]
    shape += [f"--env={name}={value}" for name, value in variables.items()]  # jobs do not inherit variables
    command = [*strace, "-s", "4096", "-o", str(trace), *submit, *shape, "--parsable", str(script)]
    # strace ends with the last process of the job.
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=900, stdout=subprocess.DEVNULL)
    [run_dir] = (folder / "runs").glob("train*")
    ended = [line for line in (run_dir / "events.jsonl").read_text().splitlines() if '"ended"' in line]
    if not ended or '"exit_code": 0' not in ended[-1]:
        raise RuntimeError(f"the job of {nodes} nodes failed: {ended}; see {run_dir}")
    with trace.open(errors="replace") as lines:
        reader = TraceReader(str(run_dir))
        operations = list(reader.operations(lines))
    created = {operation.path for operation in operations if operation.path.endswith("/claim")}
    begin = min(operation.time for operation in operations if operation.path in created)
    of_job = {operation.path for operation in operations if operation.time >= begin}
    files = sum(str(path) in of_job and path.lstat().st_ctime >= begin for path in run_dir.rglob("*"))
    if len(reader.record_times) != nodes * RANKS_PER_NODE:
        raise RuntimeError(f"{len(reader.record_times)} of {nodes * RANKS_PER_NODE} ranks have records")
    return AttemptCounts(count_by_phase(operations, begin, reader.record_times), files)


def count_by_phase(
    operations: Sequence[FileOperation], begin: float, renames: Mapping[str, Sequence[float]]
) -> dict[tuple[str, str, str], float]:
    """Count the operations of the start, of a mean minute of training, and of the end.

    A rank's record is renamed when training begins and when it has ended; mv makes two calls of the second.
    """
    if any(len(times) < 2 for times in renames.values()):
        raise RuntimeError("the record of a rank was not renamed at its end")
    settled = max(times[0] for times in renames.values()) + SETTLED_S
    ended = min(times[1] for times in renames.values()) - 0.5
    if ended < settled + IDLE_S:
        raise RuntimeError(f"training ended {ended - settled:.0f} s after the start: too soon")
    cells: dict[tuple[str, str, str], float] = defaultdict(float)
    for operation in operations:
        if begin <= operation.time < settled:
            cells["start", operation.role, operation.kind] += 1
        elif settled <= operation.time < settled + IDLE_S:
            cells["idle minute", operation.role, operation.kind] += 60 / IDLE_S
        elif operation.time >= ended:
            cells["end", operation.role, operation.kind] += 1
    return cells


@dataclass(frozen=True)
class Line:
    """A straight line through counts by nodes: ``base + slope * nodes``."""

    base: float
    slope: float

    def at(self, nodes: int) -> float:
        """Return the count of a job of so many nodes."""
        return max(0.0, self.base + self.slope * nodes)


def fit_line(points: Mapping[int, float]) -> Line:
    """Return the line with the least squares of deviations."""
    mean_x, mean_y = sum(points) / len(points), sum(points.values()) / len(points)
    spread = sum((x - mean_x) ** 2 for x in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread
    return Line(mean_y - slope * mean_x, slope)


def looks_per_small_look(nodes: int) -> float:
    """Return how often the supervisor of a job looks at the nodes, as a share of a small job's looks.

    See `AttemptMonitor.every`: one look a second, 2.5 s apart with many nodes.
    """
    return 2 / min(5, 2 * max(1, nodes // 64))


def report(measured: Mapping[int, AttemptCounts]) -> None:
    """Print the counts by phase, kind and role, for the measured and the extrapolated sizes."""
    files = fit_line({nodes: counts.files for nodes, counts in measured.items()})
    print(f"{'':34}" + "".join(f"{nodes:>12,}" for nodes in REPORTED_NODES) + "   largest deviation")
    row("files and folders of the job", [files.at(nodes) for nodes in REPORTED_NODES], "")
    for phase in PHASES:
        print(f"\n{phase}")
        for kind in OPERATIONS:
            show(f"  {kind}", measured, phase, ROLES, (kind,))
        show("  metadata operations", measured, phase, ROLES, OPERATIONS[:-1])
        for role in ROLES:
            show(f"    by {role}", measured, phase, (role,), OPERATIONS[:-1])


def show(
    name: str, measured: Mapping[int, AttemptCounts], phase: str, roles: Sequence[str], kinds: Sequence[str]
) -> None:
    """Print one row: the sum of some roles and kinds in a phase."""
    totals = dict.fromkeys(REPORTED_NODES, 0.0)
    deviation = 0.0
    for role in roles:
        points = {
            nodes: sum(counts.cells.get((phase, role, kind), 0) for kind in kinds)
            for nodes, counts in measured.items()
        }
        line = fit_line(points)
        for nodes in REPORTED_NODES:
            slower = looks_per_small_look(nodes) if (phase, role) == ("idle minute", "supervisor") else 1.0
            totals[nodes] += line.at(nodes) * slower
        deviation += max(abs(line.at(nodes) - count) for nodes, count in points.items())
    largest = max(
        1,
        sum(
            counts.cells.get((phase, role, kind), 0)
            for role in roles
            for kind in kinds
            for counts in [measured[max(measured)]]
        ),
    )
    row(name, list(totals.values()), f"{100 * deviation / largest:.0f} % of {largest:,.0f}")


def row(name: str, values: Sequence[float], note: str) -> None:
    """Print a row of counts."""
    print(f"{name:34}" + "".join(f"{value:>12,.0f}" for value in values) + f"   {note}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.attempt")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set for the jobs")
    parser.add_argument("--nodes", default=",".join(map(str, MEASURED_NODES)), metavar="N,N,N")
    chosen = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is missing, which counts the system calls. Install it, then run this again.")
    variables = dict(item.split("=", 1) for item in chosen.env)
    measured = {}
    for nodes in map(int, chosen.nodes.split(",")):
        with tempfile.TemporaryDirectory(prefix="dtslurm-attempt-") as name:
            measured[nodes] = measure_attempt(nodes, Path(name), variables)
        counts = measured[nodes]
        sums = {phase: sum(n for (of, _, _), n in counts.cells.items() if of == phase) for phase in PHASES}
        print(f"measured {nodes} nodes x {RANKS_PER_NODE}: {counts.files} files, {sums}", flush=True)
    print()
    report(measured)


if __name__ == "__main__":
    main()
