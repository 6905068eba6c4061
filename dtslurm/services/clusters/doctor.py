"""The checks of ``dtslurm doctor``: this machine, and the cluster in use."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import dtslurm
from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.scheduler.slurm_client import failure
from dtslurm.services.preflight.preflight import IN_AN_OPEN_FOLDER, ROOT_LOOK
from dtslurm.services.request.run_paths import run_root
from dtslurm.services.wiring.context import OWN_SLURM_HINT, ActiveCluster, Context
from dtslurm.services.wiring.login_node import NO_PYTHON, forget, query_login_node
from dtslurm.slurm import commands, parse_scontrol
from dtslurm.slurm.endings import describe_endings
from dtslurm.slurm.vulnerabilities import find_vulnerabilities
from dtslurm.store.index import default_path, explain_unwritable
from dtslurm.store.rundir import RunDir
from dtslurm.transport.connect import choose, software

_SLURM_COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")

_RECENT_RUNS = 20


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; ``ok`` is None for a neutral fact."""

    what: str
    found: str
    ok: bool | None = None
    hint: str = ""


def examine(context: Context, cluster_name: str | None, transport: str | None = None) -> list[Finding]:
    """Return the findings in the order of the checks."""
    findings = [
        Finding("dtslurm", f"{dtslurm.__version__} at {Path(dtslurm.__file__).parent}"),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
        _check_index(context),
    ]
    try:
        cluster = context.cluster(cluster_name, transport)
    except DtslurmError as error:
        return [*findings, Finding("cluster", error.message, ok=False, hint=error.hint)]
    findings.append(Finding("cluster", f"{cluster.name} ({cluster.chosen_by})", ok=True))
    if cluster.access.host and not cluster.remote:
        reason = cluster.reached_by or "as requested"
        findings.append(Finding("reached by", f"the Slurm on this machine ({reason})", ok=True))
    if cluster.remote:
        link_findings = list(_check_login_node(context, cluster))
        findings += link_findings
        if any(finding.what == "link" and finding.ok is False for finding in link_findings):
            return findings
    findings += _check_run_root(context, cluster)
    findings += _check_slurm(context, cluster)
    return findings


def _check_index(context: Context) -> Finding:
    try:
        count = len(context.index.run_dirs(limit=None))
    except StoreError as error:
        return Finding("index of runs", error.message, ok=False, hint=error.hint)
    if error_text := explain_unwritable(default_path(context.env)):
        hint = "free space in its file system, or set XDG_STATE_HOME to a folder that you can write to"
        return Finding("index of runs", f"the index cannot be written: {error_text}", ok=False, hint=hint)
    return Finding("index of runs", pluralize(count, "run"), ok=True)


def _check_login_node(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    """Yield how the login node is reached, its latency, and its user, home and Python."""
    link, login = cluster.transport, cluster.profile.login
    if cluster.reached_by:
        yield Finding(
            "reached by",
            f"SSH: {cluster.reached_by}",
            hint=f"if this machine's Slurm is the cluster's, {OWN_SLURM_HINT}",
        )
    reason = "from the profile" if login.transport != "auto" else choose(None, context.env)[1]
    try:
        forget(context, cluster)
        login_node = query_login_node(context, cluster)
        started_at = context.clock()
        link.run(["true"])
        seconds = context.clock() - started_at
    except DtslurmError as error:
        evidence = "; ".join(error.evidence)
        yield Finding(
            "link", f"{link.name} to {link.host}: {error.message} {evidence}", ok=False, hint=error.hint
        )
        return
    yield Finding(
        "link", f"{link.name} to {link.host} ({reason}), {seconds * 1000:.0f} ms a command", ok=True
    )
    yield Finding("SSH", software(link.name))
    yield Finding("login node", f"{login_node.user} on {login_node.host}, home {login_node.home}")
    yield Finding(
        "remote python",
        login_node.python or "no Python 3.6 or later",
        ok=bool(login_node.python),
        hint="" if login_node.python else NO_PYTHON,
    )


def _check_version(line: str) -> Finding:
    """Return Slurm's version and its known vulnerabilities, which the site may have patched on its own."""
    vulnerabilities = find_vulnerabilities(line)
    hint = (
        f"known vulnerabilities, unless your site patched them: {'; '.join(vulnerabilities)}"
        if vulnerabilities
        else ""
    )
    return Finding("version", line, hint=hint)


def _check_run_root(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    try:
        root = run_root(context, cluster)
    except DtslurmError as error:
        yield Finding("run root", error.message, ok=False)
        return
    answer = cluster.transport.run(["sh", "-c", f"root=$1\n{ROOT_LOOK}", "sh", root])
    fields = dict(line.partition("=")[::2] for line in answer.stdout.splitlines())
    problem = ""
    if "unwritable" in fields:
        problem = f"{root} is not writable: {fields['unwritable']}"
    elif "foreign" in fields:
        problem = f"{root} belongs to another user, who could replace the files of your runs"
    elif "open" in fields:
        problem = IN_AN_OPEN_FOLDER.format(fields["open"])
    if problem:
        hint = "set another run root with paths.run_root in the profile, or with --run-root"
        yield Finding("run root", problem, ok=False, hint=hint)
        return
    free_bytes = int(fields["free"]) * 1024 if fields.get("free", "").isdecimal() else None
    free_text = f" ({free_bytes / 2**30:.1f} GiB free)" if free_bytes is not None else ""
    yield Finding("run root", f"{root}{free_text}", ok=None if free_bytes is None else free_bytes > 2**20)


def _check_slurm(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    if cluster.profile.scheduler == "slurm":
        script = 'for name do printf "%s=%s\\n" "$name" "$(command -v "$name")"; done; sbatch --version'
        lines = cluster.transport.run(["sh", "-c", script, "sh", *_SLURM_COMMANDS]).stdout.splitlines()
        for line in lines:
            command, equals, path = line.partition("=")
            if equals:
                yield Finding(command, path or "not on PATH", ok=bool(path))
            else:
                yield _check_version(line)
    try:
        config = _query_config(cluster)
        profile = cluster.scheduler.profile(cluster.profile)
    except DtslurmError as error:
        yield Finding("scheduler", error.message, ok=False, hint=error.hint)
        return
    type_names = ", ".join(sorted(profile.node_types)) or "no node types known"
    yield Finding("scheduler", f"answers; {type_names}", ok=True)
    if cluster.profile.scheduler == "slurm":
        yield from _describe_job_ends(context, cluster, config)


def _query_config(cluster: ActiveCluster) -> str:
    """Query Slurm's configuration without any cache; raise `SlurmError` if Slurm does not answer."""
    if cluster.profile.scheduler != "slurm":
        return ""
    answer = cluster.transport.run(commands.show_config())
    if not answer.ok:
        raise failure(answer)
    return answer.stdout


def _describe_job_ends(context: Context, cluster: ActiveCluster, config: str) -> Iterator[Finding]:
    """Yield how Slurm ends and restarts jobs on this cluster, as far as its configuration shows."""
    partitions = cluster.transport.run(commands.show_partitions())
    graces = parse_scontrol.parse_grace_times(partitions.stdout if partitions.ok else "")
    for truth in describe_endings(parse_scontrol.config(config), graces, _longest_checkpoint_s(context)):
        yield Finding(truth.what, truth.found, hint=truth.hint)


def _longest_checkpoint_s(context: Context) -> float | None:
    """Return the seconds that the longest checkpoint of the last runs took; None if none is recorded here."""
    try:
        runs = [RunDir(path) for path in context.index.run_dirs(limit=_RECENT_RUNS)]
    except StoreError:
        return None
    seconds = [
        event["seconds"]
        for run in runs
        for event in run.events()
        if event.get("event") == "checkpoint" and isinstance(event.get("seconds"), (int, float))
    ]
    return max(seconds, default=None)
