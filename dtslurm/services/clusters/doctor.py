"""Look at this machine and the cluster in use, and say what works."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import dtslurm
from dtslurm.errors import DtslurmError, StoreError
from dtslurm.model.units import pluralize
from dtslurm.model.values import dataclass
from dtslurm.scheduler.slurm_client import failure
from dtslurm.services.preflight.preflight import IN_AN_OPEN_FOLDER, ROOT_LOOK
from dtslurm.services.request.run_paths import run_root
from dtslurm.services.wiring.context import IF_IT_IS_ITS_OWN, ActiveCluster, Context
from dtslurm.services.wiring.login_node import NO_PYTHON, forget, site_of
from dtslurm.slurm import commands, parse_scontrol
from dtslurm.slurm.endings import truths
from dtslurm.slurm.vulnerabilities import holes
from dtslurm.store.index import default_path, explain_unwritable
from dtslurm.store.rundir import RunDir
from dtslurm.transport.connect import choose, software

_SLURM_COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")

_LAST_RUNS = 20


@dataclass(frozen=True)
class Finding:
    """One thing looked at; ``ok`` is None where it is neither good nor bad."""

    what: str
    found: str
    ok: bool | None = None
    hint: str = ""


def examine(context: Context, cluster_name: str | None, transport: str | None = None) -> list[Finding]:
    """Return what was found, in the order of looking."""
    findings = [
        Finding("dtslurm", f"{dtslurm.__version__} at {Path(dtslurm.__file__).parent}"),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
        _index(context),
    ]
    try:
        cluster = context.cluster(cluster_name, transport)
    except DtslurmError as error:
        return [*findings, Finding("cluster", error.message, ok=False, hint=error.hint)]
    findings.append(Finding("cluster", f"{cluster.name} ({cluster.chosen_by})", ok=True))
    if cluster.access.host and not cluster.remote:
        why = cluster.reached_by or "as asked for"
        findings.append(Finding("reached by", f"the Slurm on this machine ({why})", ok=True))
    if cluster.remote:
        link = list(_link(context, cluster))
        findings += link
        if any(found.what == "link" and found.ok is False for found in link):
            return findings
    findings += _run_root(context, cluster)
    findings += _queue(context, cluster)
    return findings


def _index(context: Context) -> Finding:
    try:
        count = len(context.index.run_dirs(limit=None))
    except StoreError as error:
        return Finding("index of runs", error.message, ok=False, hint=error.hint)
    if problem := explain_unwritable(default_path(context.env)):
        hint = "free some space there, or set XDG_STATE_HOME to a folder that you may write to"
        return Finding("index of runs", f"it cannot be written: {problem}", ok=False, hint=hint)
    return Finding("index of runs", pluralize(count, "run"), ok=True)


def _link(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    """Say how the login node is reached, how far it is, and what is there."""
    link, login = cluster.transport, cluster.profile.login
    if cluster.reached_by:
        yield Finding("reached by", f"SSH: {cluster.reached_by}", hint=f"if it is, {IF_IT_IS_ITS_OWN}")
    why = "as the profile says" if login.transport != "auto" else choose(None, context.env)[1]
    try:
        forget(context, cluster)
        site = site_of(context, cluster)
        before = context.clock()
        link.run(["true"])
        took = context.clock() - before
    except DtslurmError as error:
        evidence = "; ".join(error.evidence)
        yield Finding(
            "link", f"{link.name} to {link.host}: {error.message} {evidence}", ok=False, hint=error.hint
        )
        return
    yield Finding("link", f"{link.name} to {link.host} ({why}), {took * 1000:.0f} ms a command", ok=True)
    yield Finding("SSH", software(link.name))
    yield Finding("login node", f"{site.user} on {site.host}, home {site.home}")
    yield Finding(
        "python there",
        site.python or "none of version 3.6 or later",
        ok=bool(site.python),
        hint="" if site.python else NO_PYTHON,
    )


def _version(line: str) -> Finding:
    """Tell Slurm's version, and what is known to be wrong with it; sites mend holes on their own, too."""
    known = holes(line)
    hint = f"known holes, unless your site mended them: {'; '.join(known)}" if known else ""
    return Finding("version", line, hint=hint)


def _run_root(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    try:
        root = run_root(context, cluster)
    except DtslurmError as error:
        yield Finding("run root", error.message, ok=False)
        return
    answer = cluster.transport.run(["sh", "-c", f"root=$1\n{ROOT_LOOK}", "sh", root])
    seen = dict(line.partition("=")[::2] for line in answer.stdout.splitlines())
    wrong = ""
    if "unwritable" in seen:
        wrong = f"{root} cannot be written to: {seen['unwritable']}"
    elif "foreign" in seen:
        wrong = f"{root} belongs to another user, who may swap the files of your runs"
    elif "open" in seen:
        wrong = IN_AN_OPEN_FOLDER.format(seen["open"])
    if wrong:
        hint = "name another by paths.run_root in the profile, or --run-root"
        yield Finding("run root", wrong, ok=False, hint=hint)
        return
    free = int(seen["free"]) * 1024 if seen.get("free", "").isdecimal() else None
    told = f" ({free / 2**30:.1f} GiB free)" if free is not None else ""
    yield Finding("run root", f"{root}{told}", ok=None if free is None else free > 2**20)


def _queue(context: Context, cluster: ActiveCluster) -> Iterator[Finding]:
    if cluster.profile.scheduler == "slurm":
        script = 'for name do printf "%s=%s\\n" "$name" "$(command -v "$name")"; done; sbatch --version'
        lines = cluster.transport.run(["sh", "-c", script, "sh", *_SLURM_COMMANDS]).stdout.splitlines()
        for line in lines:
            command, equals, path = line.partition("=")
            if equals:
                yield Finding(command, path or "not on PATH", ok=bool(path))
            else:
                yield _version(line)
    try:
        config = _config(cluster)
        profile = cluster.scheduler.profile(cluster.profile)
    except DtslurmError as error:
        yield Finding("scheduler", error.message, ok=False, hint=error.hint)
        return
    kinds = ", ".join(sorted(profile.node_types)) or "no node types known"
    yield Finding("scheduler", f"answers; {kinds}", ok=True)
    if cluster.profile.scheduler == "slurm":
        yield from _endings(context, cluster, config)


def _config(cluster: ActiveCluster) -> str:
    """Ask Slurm now, whatever is remembered of it; raise `SlurmError` if it does not answer."""
    if cluster.profile.scheduler != "slurm":
        return ""
    answer = cluster.transport.run(commands.show_config())
    if not answer.ok:
        raise failure(answer)
    return answer.stdout


def _endings(context: Context, cluster: ActiveCluster, config: str) -> Iterator[Finding]:
    """Say how Slurm ends jobs here and starts them anew, as far as it tells."""
    partitions = cluster.transport.run(commands.show_partitions())
    graces = parse_scontrol.graces(partitions.stdout if partitions.ok else "")
    for truth in truths(parse_scontrol.config(config), graces, _longest_save(context)):
        yield Finding(truth.what, truth.found, hint=truth.hint)


def _longest_save(context: Context) -> float | None:
    """Return how many seconds the longest checkpoint of the last runs took, as far as they lie here."""
    try:
        runs = [RunDir(path) for path in context.index.run_dirs(limit=_LAST_RUNS)]
    except StoreError:
        return None
    seconds = [
        one["seconds"]
        for run in runs
        for one in run.events()
        if one.get("event") == "checkpoint" and isinstance(one.get("seconds"), (int, float))
    ]
    return max(seconds, default=None)
