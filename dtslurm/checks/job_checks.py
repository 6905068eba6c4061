"""Check a request before it is queued, and report all problems at once. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dtslurm.checks.secrets import holds_password, looks_secret
from dtslurm.launch.base import Launcher
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import choose_destination, find_partitions_of_type, may_have, split_names
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import refusal, split_option
from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.shell import find_job_values
from dtslurm.model.units import Walltime
from dtslurm.render.directives import MEMORY_PER, find_control_characters, passes, says_the_same
from dtslurm.slurm.arrays import is_valid_job_id
from dtslurm.suggestions import list_nearest, suggest_name

# Slurm 22.05 accepts 1,000 characters and rejects 10,000; listings are unreadable long before that.
MAX_NAME = 200
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY_RANGE = re.compile(r"\d+(?:-\d+(?::[1-9]\d*)?)?", re.ASCII)
_DEPENDENCY = re.compile(
    r"singleton|(?:after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(?::\d+(?:_\d+)?(?:\+\d+)?)+",
    re.ASCII,
)
# The signals that sbatch accepts by name (src/common/proc_args.c), without KILL and STOP, which no process
# can handle.
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


def check_job_name(name: str) -> list[str]:
    """Return the problems of a job name."""
    if not name.strip():
        return ["--job-name is empty"]
    if len(name) > MAX_NAME:
        return [f"--job-name has {len(name)} characters; the maximum is {MAX_NAME}"]
    problems = find_control_characters("--job-name", name)
    if is_valid_job_id(name) and not problems:  # commands would read the name as a job id
        problems = [f"the job name {name!r} looks like a job id: set another name with --job-name (-J)"]
    return problems


def check_variables(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the problems of variable names; `check_launcher_variables` checks those of launchers."""
    invalid_names = [
        f"--env {name!r} is not a variable name (letters, digits and _, not starting with a digit)"
        for name, _ in pairs
        if not _VARIABLE.fullmatch(name)
    ]
    return [
        *invalid_names,
        *(f"--env {name} {reason}" for name, _ in pairs if (reason := own_variable(name))),
    ]


def check_launcher_variables(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> list[str]:
    """Return a problem for each variable of the job or the profile that the launcher would overwrite."""
    fabric = profile.fabric.environment if profile.fabric and layout.nodes > 1 else {}
    origin = f"of cluster {profile.name}'s profile"
    sources = {name: f"fabric.environment.{name} {origin}" for name in fabric}
    sources.update((name, f"environment.variables.{name} {origin}") for name in profile.environment.variables)
    sources.update((name, f"--env {name}") for name, _ in spec.env)
    launcher_variables = launcher.sets(spec, layout)
    return [
        f"{source} {own_variable(name, launcher.name, launcher_variables)}"
        for name, source in sources.items()
        if name in launcher_variables
    ]


def parse_array_indices(expression: str) -> list[int]:
    """Return the indices of an ``--array`` expression such as ``0-9:2,20%4``.

    Raises:
        ValueError: the expression is malformed.
    """
    body, _, limit = expression.partition("%")
    if "%" in expression and not (limit.isdecimal() and int(limit) > 0):
        raise ValueError(
            f"--array {expression}: the text after % must be the maximum number of running tasks"
        )
    indices: list[int] = []
    for range_text in body.split(","):
        if not _ARRAY_RANGE.fullmatch(range_text):
            raise ValueError(
                f"--array {expression}: {range_text!r} is not an index or a range like 0-9 or 0-9:2"
            )
        start, _, end_and_step = range_text.partition("-")
        end, _, step = end_and_step.partition(":")
        if end_and_step and int(end) < int(start):
            raise ValueError(f"--array {expression}: the range {range_text} ends before it starts")
        indices += range(int(start), int(end or start) + 1, int(step or 1))
    return indices


def check_array(expression: str | None, limit: int | None) -> list[str]:
    """Return the problems of an array expression; ``limit`` is the cluster's MaxArraySize."""
    if expression is None:
        return []
    try:
        indices = parse_array_indices(expression)
    except ValueError as error:
        return [str(error)]
    problems = []
    if len(set(indices)) != len(indices):
        problems.append(f"--array {expression}: an index appears twice")
    if limit and max(indices) >= limit:
        problems.append(f"--array {expression}: this Slurm accepts indices below {limit} (MaxArraySize)")
    return problems


def check_arguments(request_args: Sequence[str], array: str | None) -> list[str]:
    """Return a problem for each variable of array tasks in the arguments of a job that is not an array."""
    names = dict.fromkeys(name for text in request_args for name in find_job_values(text))
    return [
        f"${name} in the script's arguments has a value only in a job array: give --array (-a), or "
        f"write $${name} for the literal text"
        for name in names
        if name.startswith("SLURM_ARRAY") and array is None
    ]


def check_dependency(expression: str | None) -> list[str]:
    """Return the problems of a dependency expression."""
    if expression is None:
        return []
    invalid_parts = [
        condition for condition in re.split(r"[,?]", expression) if not _DEPENDENCY.fullmatch(condition)
    ]
    return [
        f"--dependency {condition!r} is not of a form like afterok:1234, afterany:1234:1235 or singleton"
        for condition in invalid_parts
    ]


def check_signal(name: str, lead_s: int | None) -> list[str]:
    """Return the problems of the early signal: its name, and its lead time ``lead_s`` in seconds."""
    problems = []
    if name in {"KILL", "STOP"}:
        problems.append(
            f"--signal {name}: training code cannot handle this signal; use a signal such as USR1 or USR2"
        )
    elif name not in _SIGNALS:
        problems.append(f"--signal {name!r} is not one of {', '.join(_SIGNALS)}")
    if lead_s is not None and not 1 <= lead_s <= _MAX_SIGNAL_LEAD:
        problems.append(f"--signal-before must be 1 to {_MAX_SIGNAL_LEAD} seconds, not {lead_s}")
    return problems


def note_lead_time(signal: str | None, lead_s: int | None, limit: Walltime | None) -> list[str]:
    """Return notices about the requested early signal; ``lead_s`` is in seconds before the time limit."""
    if lead_s is None:
        return [f"--signal {signal} is sent only with --signal-before SECONDS"] if signal else []
    if limit is not None and lead_s * 2 > limit.seconds:
        elapsed = limit.seconds - lead_s
        return [
            (
                f"--signal-before {lead_s} of --time {limit}: the early signal would come {elapsed} s "
                "after the start of the job"
            )
        ]
    return []


def check_sbatch_options(spec: JobSpec, layout: TaskLayout | None) -> list[str]:
    """Return the problems of options that are passed on to sbatch."""
    problems = []
    for text in spec.sbatch_options:
        if layout is not None and says_the_same(text, layout):
            continue
        if problem := refusal(text):
            problems.append(problem if text.startswith("--") else f"--sbatch {problem}")
            continue
        name, value = split_option(text)
        problems += find_control_characters(f"--{name}", value or "")
        if name in MEMORY_PER and spec.resources.mem is not None:
            problems.append(f"--mem and --{name} contradict each other; give only one of these options")
    return problems


def find_rule_conflicts(spec: JobSpec, profile: ClusterProfile, layout: TaskLayout | None) -> list[str]:
    """Return the conflicts of a request with the cluster's rules and limits in its profile."""
    resources, slurm_rules = spec.resources, profile.slurm
    problems = []
    if slurm_rules.account_required and not (resources.account or slurm_rules.account):
        problems.append(f"cluster {profile.name} requires an account: give --account (-A)")
    if slurm_rules.mem == "forbidden" and resources.mem is not None:
        problems.append(f"cluster {profile.name} does not accept --mem")
    if slurm_rules.mem == "required" and layout and layout.mem is None and not passes(spec, *MEMORY_PER):
        problems.append(f"cluster {profile.name} requires --mem")
    if slurm_rules.requeue == "forbidden" and spec.requeue:
        problems.append(
            f"--requeue: cluster {profile.name} does not allow requeues (slurm.requeue of its "
            "profile); with --max-restarts or --total-time a run continues in a new job"
        )
    if slurm_rules.requeue == "required" and spec.requeue is False:
        problems.append(f"cluster {profile.name} does not accept --no-requeue (slurm.requeue of its profile)")
    destination = choose_destination(resources, profile)
    partition, limits = destination.partition, destination.limits
    if partition == (resources.partition or slurm_rules.partition) and slurm_rules.partitions:
        unknown_names = [name for name in split_names(partition) if name not in slurm_rules.partitions]
        problems += [_describe_unknown_partition(name, profile) for name in unknown_names]
    problems += _check_node_type(resources.node_type, partition, profile)
    problems += _check_time_limit(
        resources.time, limits.max_time, slurm_rules.max_time, partition, profile.name
    )
    lead_s = spec.signal_before
    if lead_s is not None and layout and layout.time is not None and lead_s >= layout.time.seconds:
        message = (
            f"--signal-before {lead_s}: the signal would come at the start of the job, because the "
            f"time limit is {layout.time}"
        )
        problems.append(f"{message}; set a longer --time, or fewer seconds")
    max_nodes = limits.max_nodes or slurm_rules.max_nodes
    if max_nodes is not None and layout and layout.nodes + spec.extra_nodes > max_nodes:
        scope = f"partition {partition}" if limits.max_nodes else f"cluster {profile.name}"
        spare_text = f" and --spare-nodes {spec.spare_nodes}" if spec.spare_nodes else ""
        role_nodes = spec.extra_nodes - spec.spare_nodes
        role_text = f" and {role_nodes} for other roles" if role_nodes else ""
        problems.append(f"--nodes {layout.nodes}{spare_text}{role_text}: {scope} allows at most {max_nodes}")
    return problems


def note_constraint(spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return notices on how the requested constraint was combined with those of node type and cluster."""
    requested_constraint, target = (
        spec.resources.constraint,
        choose_destination(spec.resources, profile),
    )
    if target.left_out:
        omitted_texts = " and ".join(target.left_out)
        return [
            f"--constraint {target.constraint}: it cannot be combined with {omitted_texts}, which is omitted"
        ]
    if requested_constraint is None or requested_constraint == target.constraint:
        return []
    owner = f"{target.type_name} nodes or the cluster require" if target.type_name else "the cluster requires"
    return [
        (
            f"--constraint {target.constraint}: {requested_constraint} and what {owner} "
            "(--node-type selects other nodes)"
        )
    ]


def _check_node_type(type_name: str | None, partition: str | None, profile: ClusterProfile) -> list[str]:
    """Return a problem if, by the profile, the partition lacks the requested node type."""
    if type_name is None or type_name not in profile.node_types:
        return []
    if partition is None or may_have(partition, type_name, profile):
        return []
    node_types = {profile.slurm.partitions[name].node_type or "" for name in split_names(partition)}
    partitions = find_partitions_of_type(type_name, profile)
    hint = (
        f"; {type_name} nodes are in partition {', '.join(partitions)}: give -p {partitions[0]}"
        if partitions
        else ""
    )
    return [
        f"--node-type {type_name}: partition {partition} has {' and '.join(sorted(node_types))} nodes{hint}"
    ]


def _describe_unknown_partition(partition: str, profile: ClusterProfile) -> str:
    partitions = profile.slurm.partitions
    return (
        f"--partition {partition!r}: cluster {profile.name} has no such "
        f"partition{suggest_name(partition, partitions)} (available: "
        f"{list_nearest(partition, partitions)})"
    )


def _check_time_limit(
    requested_time: Walltime | None,
    partition_max: Walltime | None,
    site_max: Walltime | None,
    partition: str | None,
    name: str,
) -> list[str]:
    max_time = partition_max or site_max
    if requested_time is None or max_time is None or requested_time <= max_time:
        return []
    scope = f"partition {partition}" if partition_max else f"cluster {name}"
    return [f"--time {requested_time}: {scope} allows at most {max_time}"]


def check_secret_names(names: Sequence[str], sources_by_name: Mapping[str, str]) -> list[str]:
    """Return the problems with the names of secrets; no problem contains a value.

    Args:
        names: the values of ``--secret``.
        sources_by_name: by variable name, the option or file that writes the value into the script.
    """
    problems = []
    for name in names:
        if "=" in name:
            problems.append(
                "--secret accepts only a name: put the value into an environment variable of that name first"
            )
        elif not _VARIABLE.fullmatch(name):
            problems.append(f"--secret {name!r} is not a variable name")
        elif reason := own_variable(name):
            problems.append(f"--secret {name} {reason}")
        elif name in sources_by_name:
            problems.append(
                f"--secret {name}: {sources_by_name[name]} also sets {name}, and writes its value into the "
                "script; remove one of them"
            )
    return problems


def note_secrets(spec: JobSpec) -> list[str]:
    """Return notices on variables of the script that seem to hold secrets."""
    return [
        *(
            f"--env {name} is written into the script; --secret {name} keeps its value out of it"
            for name, _ in spec.env
            if looks_secret(name)
        ),
        *(
            f"{name} is an address with a password in it, which is written into the script; "
            f"--secret {name} keeps it out of it"
            for name, value in spec.env
            if holds_password(value) and not looks_secret(name)
        ),
    ]
