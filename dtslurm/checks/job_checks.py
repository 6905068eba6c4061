"""Everything that can be known to be wrong with a request before it is queued, all at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtslurm.launch.base import Launcher
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import destination, homes_of, may_have, names_in
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import refusal, split_option
from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.shell import job_values_in
from dtslurm.model.units import Walltime
from dtslurm.render.directives import MEMORY_PER, passes, says_the_same, unholdable
from dtslurm.slurm.arrays import valid
from dtslurm.suggestions import list_nearest, suggest_name

MAX_NAME = (
    200  # Slurm 22.05 takes 1,000 characters and refuses 10,000; listings become unreadable long before
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY_PART = re.compile(r"\d+(?:-\d+(?::[1-9]\d*)?)?", re.ASCII)
_DEPENDENCY = re.compile(
    r"singleton|(?:after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(?::\d+(?:_\d+)?(?:\+\d+)?)+",
    re.ASCII,
)
# Those that sbatch knows by name (src/common/proc_args.c), without the two that nothing can hear.
_SIGNALS = (
    "HUP",
    "INT",
    "QUIT",
    "ABRT",
    "ALRM",
    "TERM",
    "USR1",
    "USR2",
    "URG",
    "CONT",
    "TSTP",
    "TTIN",
    "TTOU",
)
_MAX_SIGNAL_LEAD = 65535  # sbatch(1), --signal


def job_name(name: str) -> list[str]:
    """Return what is wrong with a job name."""
    if not name.strip():
        return ["--job-name is empty"]
    if len(name) > MAX_NAME:
        return [f"--job-name has {len(name)} characters; at most {MAX_NAME} are taken"]
    problems = unholdable("--job-name", name)
    if valid(name) and not problems:  # commands would take it for that job
        problems = [f"the job's name {name} reads like a job's number: give it another by --job-name (-J)"]
    return problems


def variables(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return what is wrong with variable names; those of launchers are `launchers_variables`' matter."""
    misspelt = [
        f"--env {name!r} is not a variable name (letters, digits and _, not starting with a digit)"
        for name, _ in pairs
        if not _VARIABLE.fullmatch(name)
    ]
    return [*misspelt, *(f"--env {name} {why}" for name, _ in pairs if (why := own_variable(name)))]


def launchers_variables(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> list[str]:
    """Return which variables the launcher sets, so that a value of the job's or the site's would be lost."""
    fabric = profile.fabric.environment if profile.fabric and layout.nodes > 1 else {}
    of = f"of cluster {profile.name}'s profile"
    told = {name: f"fabric.environment.{name} {of}" for name in fabric}
    told.update((name, f"environment.variables.{name} {of}") for name in profile.environment.variables)
    told.update((name, f"--env {name}") for name, _ in spec.env)
    sets = launcher.sets(spec, layout)
    return [
        f"{what} {own_variable(name, launcher.name, sets)}" for name, what in told.items() if name in sets
    ]


def array_indices(expression: str) -> list[int]:
    """Return the indices of an ``--array`` expression such as ``0-9:2,20%4``.

    Raises:
        ValueError: the expression is malformed.
    """
    body, _, limit = expression.partition("%")
    if "%" in expression and not (limit.isdecimal() and int(limit) > 0):
        raise ValueError(f"--array {expression}: after % comes how many tasks may run at once")
    indices: list[int] = []
    for part in body.split(","):
        if not _ARRAY_PART.fullmatch(part):
            raise ValueError(f"--array {expression}: {part!r} is not an index or a range like 0-9 or 0-9:2")
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        if rest and int(last) < int(first):
            raise ValueError(f"--array {expression}: the range {part} ends before it starts")
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def array(expression: str | None, limit: int | None) -> list[str]:
    """Return what is wrong with an array expression; ``limit`` is the site's MaxArraySize."""
    if expression is None:
        return []
    try:
        indices = array_indices(expression)
    except ValueError as error:
        return [str(error)]
    problems = []
    if len(set(indices)) != len(indices):
        problems.append(f"--array {expression}: an index appears twice")
    if limit and max(indices) >= limit:
        problems.append(f"--array {expression}: this Slurm takes indices below {limit} (MaxArraySize)")
    return problems


def job_values(request_args: Sequence[str], array: str | None) -> list[str]:
    """Return which arguments have a value of an array's task, though the job is no array."""
    names = dict.fromkeys(name for text in request_args for name in job_values_in(text))
    return [
        f"${name} in the script's arguments has a value in a job array only: give --array (-a), "
        f"or write $${name} for the text itself"
        for name in names
        if name.startswith("SLURM_ARRAY") and array is None
    ]


def dependency(expression: str | None) -> list[str]:
    """Return what is wrong with a dependency expression."""
    if expression is None:
        return []
    wrong = [part for part in re.split(r"[,?]", expression) if not _DEPENDENCY.fullmatch(part)]
    return [
        f"--dependency {part!r} is not of a form like afterok:1234, afterany:1234:1235 or singleton"
        for part in wrong
    ]


def signals(name: str, before: int | None) -> list[str]:
    """Return what is wrong with the early signal."""
    problems = []
    if name in {"KILL", "STOP"}:
        problems.append(f"--signal {name}: training cannot hear it; use one like USR1 or USR2")
    elif name not in _SIGNALS:
        problems.append(f"--signal {name!r} is none of {', '.join(_SIGNALS)}")
    if before is not None and not 1 <= before <= _MAX_SIGNAL_LEAD:
        problems.append(f"--signal-before takes 1 to {_MAX_SIGNAL_LEAD} seconds, not {before}")
    return problems


def lead_notices(signal: str | None, lead: int | None, limit: Walltime | None) -> list[str]:
    """Return what the user should know of the early signal that was asked for, where it can be sent."""
    if lead is None:
        return [f"--signal {signal} is sent only with --signal-before SECONDS"] if signal else []
    if limit is not None and lead * 2 > limit.seconds:
        left = limit.seconds - lead
        return [f"--signal-before {lead} of --time {limit}: training is told to save after {left} s already"]
    return []


def sbatch_options(spec: JobSpec, layout: TaskLayout | None) -> list[str]:
    """Return what is wrong with options to be passed on to sbatch."""
    problems = []
    for text in spec.sbatch_options:
        if layout is not None and says_the_same(text, layout):
            continue
        if wrong := refusal(text):
            problems.append(wrong if text.startswith("--") else f"--sbatch {wrong}")
            continue
        name, value = split_option(text)
        problems += unholdable(f"--{name}", value or "")
        if name in MEMORY_PER and spec.resources.mem is not None:
            problems.append(f"--mem and --{name} contradict each other; give one of them")
    return problems


def site(spec: JobSpec, profile: ClusterProfile, layout: TaskLayout | None) -> list[str]:
    """Return where the request is against the site's customs and limits, as far as the profile tells."""
    asked, customs = spec.resources, profile.slurm
    problems = []
    if customs.account_required and not (asked.account or customs.account):
        problems.append(f"cluster {profile.name} wants an account: give --account (-A)")
    if customs.mem == "forbidden" and asked.mem is not None:
        problems.append(f"cluster {profile.name} does not take --mem")
    if customs.mem == "required" and layout and layout.mem is None and not passes(spec, *MEMORY_PER):
        problems.append(f"cluster {profile.name} wants --mem")
    if customs.requeue == "forbidden" and spec.requeue:
        problems.append(
            f"--requeue: cluster {profile.name} lets no job be requeued (slurm.requeue of its profile); "
            "with --max-restarts or --total-time a run goes on by a new job"
        )
    if customs.requeue == "required" and spec.requeue is False:
        problems.append(f"cluster {profile.name} does not take --no-requeue (slurm.requeue of its profile)")
    goes = destination(asked, profile)
    partition, limits = goes.partition, goes.limits
    if partition == (asked.partition or customs.partition) and customs.partitions:
        unknown = [name for name in names_in(partition) if name not in customs.partitions]
        problems += [_unknown_partition(name, profile) for name in unknown]
    problems += _elsewhere(asked.node_type, partition, profile)
    problems += _over(asked.time, limits.max_time, customs.max_time, partition, profile.name)
    lead = spec.signal_before
    if lead is not None and layout and layout.time is not None and lead >= layout.time.seconds:
        told = (
            f"--signal-before {lead}: the signal would come as the job starts, which ends after {layout.time}"
        )
        problems.append(f"{told}; give a longer --time, or fewer seconds")
    most = limits.max_nodes or customs.max_nodes
    if most is not None and layout and layout.nodes + spec.spare_nodes > most:
        where = f"partition {partition}" if limits.max_nodes else f"cluster {profile.name}"
        spare = f" and --spare-nodes {spec.spare_nodes}" if spec.spare_nodes else ""
        problems.append(f"--nodes {layout.nodes}{spare}: {where} allows at most {most}")
    return problems


def constraint_notices(spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return what became of the constraint asked for beside those of the node type and of the cluster."""
    asked, goes = spec.resources.constraint, destination(spec.resources, profile)
    if goes.left_out:
        left = " and ".join(goes.left_out)
        return [f"--constraint {goes.constraint}: it cannot be joined with {left}, which is left out"]
    if asked is None or asked == goes.constraint:
        return []
    whose = f"{goes.type_name} nodes or the cluster want" if goes.type_name else "the cluster wants"
    return [f"--constraint {goes.constraint}: {asked} and what {whose} (--node-type chooses other nodes)"]


def _elsewhere(type_name: str | None, partition: str | None, profile: ClusterProfile) -> list[str]:
    """Return that a partition has other nodes than those asked for, where the profile tells."""
    if type_name is None or type_name not in profile.node_types:
        return []
    if partition is None or may_have(partition, type_name, profile):
        return []
    there = {profile.slurm.partitions[name].node_type or "" for name in names_in(partition)}
    homes = homes_of(type_name, profile)
    where = f"; {type_name} nodes are in {', '.join(homes)}: give -p {homes[0]}" if homes else ""
    return [f"--node-type {type_name}: partition {partition} has {' and '.join(sorted(there))} nodes{where}"]


def _unknown_partition(partition: str, profile: ClusterProfile) -> str:
    known = profile.slurm.partitions
    return (
        f"--partition {partition!r}: cluster {profile.name} has none of that name"
        f"{suggest_name(partition, known)} (there are: {list_nearest(partition, known)})"
    )


def _over(
    asked: Walltime | None,
    partition_max: Walltime | None,
    site_max: Walltime | None,
    partition: str | None,
    name: str,
) -> list[str]:
    most = partition_max or site_max
    if asked is None or most is None or asked <= most:
        return []
    where = f"partition {partition}" if partition_max else f"cluster {name}"
    return [f"--time {asked}: {where} allows at most {most}"]
