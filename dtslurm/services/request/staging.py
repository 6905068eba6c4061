"""Whether data can be brought to the nodes' local disks, as far as that is known before queueing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os.path import normpath

from dtslurm import assets
from dtslurm.errors import TransportError
from dtslurm.model.cluster import ClusterProfile, LocalDisk
from dtslurm.model.jobs.destination import destination
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.jobs.options import Placement
from dtslurm.model.jobs.sbatch import split_option
from dtslurm.render.staging import items
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster
from dtslurm.transport.disk import size
from dtslurm.worker.staging.request import Item, parse

FOLDER = "staging"
_BRACED = re.compile(r"\$\{(\w+)\}")
_START = """\
from worker.staging.main import main

main()
"""
_MEASURE_S = 20  # a folder that takes longer to look through is measured by the job itself
# Arguments: seconds, then the sources. What cannot be measured in time says so by "?".
_LOOK = """\
limit=$1
shift
for source; do
  if [ ! -e "$source" ]; then
    echo "missing=$source"
  else
    [ ! -d "$source" ] || echo "folder=$source"
    kib=$(timeout "$limit" du -skL "$source" 2>/dev/null | cut -f1)
    echo "${kib:-?}=$source"
  fi
done
"""


def disk_of(asked: Placement, profile: ClusterProfile) -> LocalDisk | None:
    """Return the local disk of the nodes asked for, None where the profile tells of none."""
    node = destination(asked, profile).node
    return node.local_disk if node else None


def texts(written: Sequence[str], disk: LocalDisk | None = None, *, out: bool = False) -> tuple[str, ...]:
    """Return what was asked for with its place and name written out; what is wrong is left to `problems`."""
    found = []
    for text in written:
        try:
            found.append(parse(text, disk.path if disk else "", out).text)
        except ValueError:
            continue
    return tuple(found)


def problems(request: JobRequest, spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return what is wrong with what is to be staged."""
    disk = disk_of(request, profile)
    found = []
    for option, written, out in (
        ("--stage", request.stage_in, False),
        ("--stage-out", request.stage_out, True),
    ):
        names: dict[str, str] = {}
        earlier: list[Item] = []
        for text in written:
            try:
                item = parse(text, disk.path if disk else "", out)
            except ValueError as error:
                found.append(f"{option} {text}: {error}")
                continue
            if item.name in names:
                found.append(f"{option} {text}: {names[item.name]} is called {item.name} too; add :name=...")
            names[item.name] = item.source
            if spec.container and "$" in (item.source if out else item.to):
                found.append(
                    f"{option} {text}: a container must have the place mounted; name it without variables"
                )
            told = _clash_of_results(item, earlier) if out else _clash(item, earlier)
            found += [f"{option} {text}: {told}"] if told else []
            earlier.append(item)
    return found


def _clash(item: Item, earlier: Sequence[Item]) -> str:
    """Return which other data the place of an item holds, or which source it would be written into."""
    for other in earlier:
        if _overlap(item.to, other.to):
            return f"its place and {other.to}, where {other.source} goes, are one or lie in one another"
    pairs = [(item, item), *((item, other) for other in earlier), *((other, item) for other in earlier)]
    for placed, read in pairs:
        if _overlap(placed.to, read.source):
            return f"{placed.to} and the source {read.source} are one or lie in one another; stage elsewhere"
    return ""


def _clash_of_results(item: Item, earlier: Sequence[Item]) -> str:
    same = [other.source for other in earlier if _plain(other.to) == _plain(item.to)]
    return f"{same[0]} is brought to {item.to} too; give each a place of its own" if same else ""


def _overlap(one: str, other: str) -> bool:
    return _below(_plain(one), _plain(other)) or _below(_plain(other), _plain(one))


def _plain(path: str) -> str:
    """Return a path as it compares with others: one way of writing variables and slashes."""
    return normpath(_BRACED.sub(r"$\1", path))


def notices(spec: JobSpec, profile: ClusterProfile, *, submitted: bool) -> Iterator[str]:
    """Yield what the user should know of what is staged."""
    disk = disk_of(spec.resources, profile)
    if disk and disk.flag and _uses(spec, disk) and not _granted(spec, profile, disk.flag):
        yield f"the nodes' disk at {disk.path} is there only with {disk.flag}; give it, or by --sbatch"
    if spec.stage_in and not submitted:
        yield "by plain sbatch the data is copied by cp, without checks of room; submit checks"
        if any(item.shards for item in items(spec)):
            yield "by plain sbatch every node gets all shards"
    if spec.stage_out and spec.signal_before is None:
        yield "--stage-out brings results back at the end; --signal-before N does so before the limit too"
    if spec.artifacts and not submitted:
        yield "artifacts are registered by what submit brings, not by plain sbatch"


def _uses(spec: JobSpec, disk: LocalDisk) -> bool:
    return any(_below(item.to, disk.path) for item in items(spec))


def _below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(folder.rstrip("/") + "/")


def _granted(spec: JobSpec, profile: ClusterProfile, flag: str) -> bool:
    """Tell whether an option that grants the disk is asked for, in whatever form."""
    try:
        name, value = split_option(flag)
    except ValueError:
        return False
    given = [option for option in spec.sbatch_options if option.startswith(f"--{name}")]
    constraint = destination(spec.resources, profile).constraint
    if name == "constraint" and constraint:
        given.append(f"--constraint={constraint}")
    return any((value or "").partition(":")[0] in option for option in given)


def sizes(cluster: ActiveCluster, spec: JobSpec) -> list[str]:
    """Return which sources are missing, are no archives, or larger than the disk is by the profile."""
    wanted = items(spec)
    if not wanted:
        return []
    try:
        argv = ["sh", "-c", _LOOK, "sh", str(_MEASURE_S), *(item.source for item in wanted)]
        answer = cluster.transport.run(argv, timeout=60 + _MEASURE_S * len(wanted))
    except TransportError:
        return []  # whoever sends the job will tell
    archives = {item.source for item in wanted if item.method == "unpack"}
    found, measured = [], {}
    for line in answer.stdout.splitlines():
        told, _, source = line.partition("=")
        if told == "missing":
            found.append(f"--stage {source}: there is no {source} on {cluster.name}")
        elif told == "folder" and source in archives:
            found.append(
                f"--stage {source}: it is a folder on {cluster.name}; method=unpack is for one archive"
            )
        elif told.isdecimal():
            measured[source] = int(told) * 1024
    disk = disk_of(spec.resources, cluster.profile)
    if disk is None or disk.size is None:
        return found
    room = disk.size.mib << 20
    whole = [item for item in wanted if _below(item.to, disk.path) and not item.shards]
    total = sum(measured.get(item.source, 0) for item in whole)
    if total > room:
        names = ", ".join(item.source for item in whole)
        found.append(
            f"--stage {names}: {size(total)} do not fit on {disk.path}, "
            f"which has {size(room)} by the profile of {cluster.profile.name}"
        )
    return found


def files(spec: JobSpec) -> dict[str, bytes]:
    """Return the program's files by their paths in the run directory, none where nothing is staged."""
    if not (spec.stage_in or spec.stage_out or spec.artifacts):
        return {}
    worker = assets.worker("staging").parent
    supervisor = [worker / "supervisor" / name for name in ("__init__.py", "slurm.py")]
    paths = [worker / "__init__.py", worker / "artifacts.py", *supervisor]
    paths += sorted((worker / "staging").glob("*.py"))
    found = {f"{FOLDER}/worker/{path.relative_to(worker)}": path.read_bytes() for path in paths}
    found[f"{FOLDER}/__main__.py"] = _START.encode()
    return found
