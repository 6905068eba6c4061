"""Checks, before submission, whether data can be staged to the nodes' local disks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os.path import normpath

from dtslurm import assets
from dtslurm.errors import TransportError
from dtslurm.model.cluster import ClusterProfile, LocalDisk
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.jobs.options import Placement
from dtslurm.model.jobs.sbatch import split_option
from dtslurm.presentation.quantities import format_bytes
from dtslurm.render.staging import items
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster
from dtslurm.worker.staging.request import Item, parse

FOLDER = "staging"
_BRACED_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MAIN_PROGRAM = """\
from worker.staging.main import main

main()
"""
_MEASURE_LIMIT_S = 20  # a folder that takes longer to measure is left to the job itself
# Arguments: seconds, then the sources. The size of a source that takes longer is printed as "?".
_MEASURE_SCRIPT = """\
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


def disk_of(placement: Placement, profile: ClusterProfile) -> LocalDisk | None:
    """Return the local disk of the requested nodes, None if the profile describes none."""
    node = choose_destination(placement, profile).node
    return node.local_disk if node else None


def texts(
    option_texts: Sequence[str], disk: LocalDisk | None = None, *, is_stage_out: bool = False
) -> tuple[str, ...]:
    """Return staging options with destination and name made explicit; invalid ones are left to `problems`."""
    completed_texts = []
    for text in option_texts:
        try:
            completed_texts.append(parse(text, disk.path if disk else "", is_stage_out).text)
        except ValueError:
            continue
    return tuple(completed_texts)


def problems(request: JobRequest, spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return the problems with the data to stage."""
    disk = disk_of(request, profile)
    errors = []
    for option, option_texts, is_stage_out in (
        ("--stage", request.stage_in, False),
        ("--stage-out", request.stage_out, True),
    ):
        sources_by_name: dict[str, str] = {}
        earlier_items: list[Item] = []
        for text in option_texts:
            try:
                item = parse(text, disk.path if disk else "", is_stage_out)
            except ValueError as error:
                errors.append(f"{option} {text}: {error}")
                continue
            if item.name in sources_by_name:
                errors.append(
                    f"{option} {text}: {sources_by_name[item.name]} also has the name {item.name}; "
                    "add :name=..."
                )
            sources_by_name[item.name] = item.source
            if spec.container and "$" in (item.source if is_stage_out else item.to):
                errors.append(
                    f"{option} {text}: the destination must be mounted in the container; write its "
                    "path without variables"
                )
            clash = (
                _describe_result_clash(item, earlier_items)
                if is_stage_out
                else _describe_clash(item, earlier_items)
            )
            errors += [f"{option} {text}: {clash}"] if clash else []
            earlier_items.append(item)
    return errors


def _describe_clash(item: Item, earlier_items: Sequence[Item]) -> str:
    """Return why an item's destination overlaps another destination or a source; empty if it does not."""
    for other_item in earlier_items:
        if _overlap(item.to, other_item.to):
            return (
                f"its destination and {other_item.to}, the destination of {other_item.source}, are the same "
                "folder, or one contains the other"
            )
    pairs = [
        (item, item),
        *((item, other_item) for other_item in earlier_items),
        *((other_item, item) for other_item in earlier_items),
    ]
    for dest, origin in pairs:
        if _overlap(dest.to, origin.source):
            return (
                f"{dest.to} and the source {origin.source} are the same folder, or one contains the "
                "other; choose another destination"
            )
    return ""


def _describe_result_clash(item: Item, earlier_items: Sequence[Item]) -> str:
    sources = [
        other_item.source
        for other_item in earlier_items
        if _normalized(other_item.to) == _normalized(item.to)
    ]
    return (
        f"{sources[0]} is also copied to {item.to}; give each source its own destination" if sources else ""
    )


def _overlap(first_path: str, second_path: str) -> bool:
    return _is_below(_normalized(first_path), _normalized(second_path)) or _is_below(
        _normalized(second_path), _normalized(first_path)
    )


def _normalized(path: str) -> str:
    """Return a path in comparable form: variables and slashes are written in one way."""
    return normpath(_BRACED_VARIABLE.sub(r"$\1", path))


def notices(spec: JobSpec, profile: ClusterProfile, *, is_submitted: bool) -> Iterator[str]:
    """Yield warnings about the data to stage."""
    disk = disk_of(spec.resources, profile)
    if disk and disk.flag and _uses_disk(spec, disk) and not _requests_flag(spec, profile, disk.flag):
        yield (
            f"the nodes have the local disk {disk.path} only with {disk.flag}; give this option, "
            "directly or with --sbatch"
        )
    if spec.stage_in and not is_submitted:
        yield "with plain sbatch, cp copies the data without checking free space; dtslurm submit checks it"
        if any(item.shards for item in items(spec)):
            yield "with plain sbatch, every node gets all shards"
    if spec.stage_out and spec.signal_before is None:
        yield (
            "--stage-out copies results back at the end of the job; with --signal-before N also before "
            "the time limit"
        )
    if spec.artifacts and not is_submitted:
        yield "artifacts are registered only in jobs of dtslurm submit, not with plain sbatch"


def _uses_disk(spec: JobSpec, disk: LocalDisk) -> bool:
    return any(_is_below(item.to, disk.path) for item in items(spec))


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(folder.rstrip("/") + "/")


def _requests_flag(spec: JobSpec, profile: ClusterProfile, flag: str) -> bool:
    """Return whether the job requests the option that grants the disk, in any form."""
    try:
        name, value = split_option(flag)
    except ValueError:
        return False
    options = [option for option in spec.sbatch_options if option.startswith(f"--{name}")]
    constraint = choose_destination(spec.resources, profile).constraint
    if name == "constraint" and constraint:
        options.append(f"--constraint={constraint}")
    return any((value or "").partition(":")[0] in option for option in options)


def sizes(cluster: ActiveCluster, spec: JobSpec) -> list[str]:
    """Return the problems with the sources: missing, not an archive, or larger than the profile's disk."""
    staged_items = items(spec)
    if not staged_items:
        return []
    try:
        argv = [
            "sh",
            "-c",
            _MEASURE_SCRIPT,
            "sh",
            str(_MEASURE_LIMIT_S),
            *(item.source for item in staged_items),
        ]
        answer = cluster.transport.run(argv, timeout=60 + _MEASURE_LIMIT_S * len(staged_items))
    except TransportError:
        return []  # the submission itself will report that the cluster cannot be reached
    archives = {item.source for item in staged_items if item.method == "unpack"}
    errors, bytes_by_source = [], {}
    for line in answer.stdout.splitlines():
        status, _, source = line.partition("=")
        if status == "missing":
            errors.append(f"--stage {source}: {source} does not exist on {cluster.name}")
        elif status == "folder" and source in archives:
            errors.append(
                f"--stage {source}: {source} is a folder on {cluster.name}; method=unpack needs an "
                "archive file"
            )
        elif status.isdecimal():
            bytes_by_source[source] = int(status) * 1024
    disk = disk_of(spec.resources, cluster.profile)
    if disk is None or disk.size is None:
        return errors
    capacity = disk.size.mib << 20
    unsharded_items = [item for item in staged_items if _is_below(item.to, disk.path) and not item.shards]
    total = sum(bytes_by_source.get(item.source, 0) for item in unsharded_items)
    if total > capacity:
        names = ", ".join(item.source for item in unsharded_items)
        errors.append(
            f"--stage {names}: {format_bytes(total)} do not fit on {disk.path}, which has "
            f"{format_bytes(capacity)} according to the profile of {cluster.profile.name}"
        )
    return errors


def files(spec: JobSpec) -> dict[str, bytes]:
    """Return the staging program's files by their paths in the run directory; empty if nothing is staged."""
    if not (spec.stage_in or spec.stage_out or spec.artifacts):
        return {}
    worker = assets.worker("staging").parent
    supervisor = [worker / "supervisor" / name for name in ("__init__.py", "slurm.py")]
    paths = [worker / "__init__.py", worker / "artifacts.py", *supervisor]
    paths += [path for name in ("lib", "staging") for path in sorted((worker / name).glob("*.py"))]
    contents = {f"{FOLDER}/worker/{path.relative_to(worker)}": path.read_bytes() for path in paths}
    contents[f"{FOLDER}/__main__.py"] = _MAIN_PROGRAM.encode()
    return contents
