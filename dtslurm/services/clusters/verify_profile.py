"""Prove a profile: dry submissions, a look at its nodes from inside, and the network between two of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dtslurm.discover import claims, from_slurm
from dtslurm.discover.claims import Evidence, Row
from dtslurm.discover.kinds import kinds
from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import destination, names_in
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.options import Placement
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.scheduler.base import NodeLister
from dtslurm.scheduler.slurm_profile import complete
from dtslurm.services.clusters.discover import DiscoverOptions, look, python_of, seen_by, targets_of
from dtslurm.services.clusters.probing import Probe, probe
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs import control
from dtslurm.services.runs.status import views
from dtslurm.services.submit.prepare import AUTO, prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import commands
from dtslurm.slurm.parse_errors import cannot_run, lacks_nodes, words
from dtslurm.slurm.survey import Survey

_MOST_PARTITIONS = 12
_CHUNK = 40  # dry submissions in one command
_LOOK_S = 2.0
_SCRIPT = "check"

# Arguments: headers of batch scripts. Prints sbatch's exit code and words for each.
_DRY_RUN = f"""\
{commands.LOGIN_PATH}
for script do
  said=$(printf '%s\\nexit 0\\n' "$script" | sbatch --test-only 2>&1)
  printf '\\036%s\\n%s\\n' "$?" "$said"
done
"""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What became of a profile's claims.

    Attributes:
        notices: what the person who asked should know beside the rows.
    """

    name: str
    rows: tuple[Row, ...]
    notices: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no claim was found to be wrong."""
        return not any(row.verdict == "differs" and row.fails for row in self.rows)


def prove(
    context: Context,
    cluster: ActiveCluster,
    wanted: DiscoverOptions,
    *,
    launchers: Sequence[str] = (),
    fabric: bool = True,
    transport: str | None = None,
    say: Say = lambda _: None,
) -> Proof:
    """Hold a profile's claims against the cluster.

    Args:
        launchers: whose jobs are submitted dry; all of them by default.
        fabric: run a job on two nodes that measures the network between them.

    Raises:
        RequestInvalid, SlurmUnavailable, TransportError: see `discover.look`; there is no such launcher.
    """
    for name in launchers:
        registry.load(name)
    survey = look(cluster)
    profile = cluster.profile
    groups = kinds(survey.nodes)
    names = from_slurm.names_of(groups, profile)
    probes: tuple[Probe, ...] = ()
    notices: list[str] = []
    found = from_slurm.found(survey, groups, profile)
    if wanted.probe:
        targets, left_out = targets_of(groups, names, wanted, profile, survey)
        python = python_of(context, cluster, None)
        probes = tuple(probe(context, cluster, targets, wait_s=wanted.wait_s, python=python, say=say))
        notices += left_out
        seen = seen_by(probes, groups, names, pyxis=survey.pyxis)
        found += seen
    evidence = Evidence(
        survey=survey,
        kinds=groups,
        names=names,
        found=found,
        seen={one.name: one.seen for one in probes if one.seen},
    )
    rows = claims.judge(profile, evidence)
    if profile.default_launcher:
        rows.append(claims.launcher(profile.default_launcher, [*registry.names(), AUTO]))
    live = context.completed(
        cluster, complete(profile, survey.partitions, survey.nodes, survey.config), transport
    )
    rows += _dry_runs(context, live, survey, wanted, launchers or registry.names(), transport)
    if fabric and wanted.probe:
        rows.append(_fabric(context, live, wanted, probes, transport, say))
    notices += [line for line in found.notices if line not in notices]
    return Proof(name=cluster.name, rows=tuple(rows), notices=tuple(notices), probes=probes)


# ---- Dry submissions ----


def _dry_runs(
    context: Context,
    cluster: ActiveCluster,
    survey: Survey,
    wanted: DiscoverOptions,
    launchers: Sequence[str],
    transport: str | None,
) -> list[Row]:
    """Let Slurm judge jobs of all kinds; equal requests are asked once."""
    asked: dict[tuple[str, str], list[str]] = {}
    rows = []
    jobs = _kinds_of_jobs(cluster.profile, survey, wanted, launchers)
    goes = {where: destination(placement, cluster.profile).partition for where, placement, _ in jobs}
    for where, placement, launcher in jobs:
        try:
            header = _header(context, cluster, wanted, placement, launcher, transport)
        except DtslurmError as error:
            said = "; ".join(getattr(error, "problems", ()) or [error.message])
            rows.append(claims.dry_run(where, [launcher], said, refused=True))
            continue
        asked.setdefault((where, header), []).append(launcher)
    answers = dict(zip(asked, _answers(cluster, [header for _, header in asked]), strict=True))
    wanting = [key for key, answer in answers.items() if answer.lacks_nodes]
    alone = zip(wanting, _answers(cluster, [_on_one_node(header) for _, header in wanting]), strict=True)
    lacking = [key for key, answer in alone if answer.lacks_nodes]
    up = {place: _all_up(cluster, place) for place in {goes[where] for where, _ in lacking}}
    never = {key for key in lacking if up[goes[key[0]]]}
    rows += [_judged(key[0], asked[key], answer, never=key in never) for key, answer in answers.items()]
    return rows


def _kinds_of_jobs(
    profile: ClusterProfile, survey: Survey, wanted: DiscoverOptions, launchers: Sequence[str]
) -> list[tuple[str, Placement, str]]:
    """Return (where in words, where, launcher): every launcher in every partition.

    Node types that no partition stands for get one job of one launcher.
    """
    partitions = _partitions(profile, survey, wanted)
    jobs = [(f"partition {name}", Placement(partition=name), one) for name in partitions for one in launchers]
    beside = _types_beside(profile, partitions, wanted)
    return jobs + [(f"node type {name}", Placement(node_type=name), launchers[0]) for name in beside]


@dataclass(frozen=True)
class _Answer:
    """What Slurm says to a dry submission."""

    ok: bool
    said: str

    @property
    def lacks_nodes(self) -> bool:
        """Whether no nodes were found for it."""
        return not self.ok and lacks_nodes(self.said)


def _answers(cluster: ActiveCluster, headers: Sequence[str]) -> list[_Answer]:
    found: list[_Answer] = []
    for start in range(0, len(headers), _CHUNK):
        part = headers[start : start + _CHUNK]
        argv = ["sh", "-c", _DRY_RUN, "dtslurm-check", *part]
        for answer in cluster.transport.run(argv, timeout=150).stdout.split("\x1e")[1 : len(part) + 1]:
            code, _, said = answer.partition("\n")
            found.append(_Answer(code.strip() == "0", said))
        found += [_Answer(ok=False, said="")] * (start + len(part) - len(found))
    return found


def _all_up(cluster: ActiveCluster, partition: str | None) -> bool:
    """Tell whether all nodes of a partition take jobs now: what none of them has now, none will have."""
    try:
        nodes = cluster.scheduler.nodes(partition) if isinstance(cluster.scheduler, NodeLister) else []
    except DtslurmError:
        return False  # nobody tells
    return bool(nodes) and all(node.usable for node in nodes)


def _on_one_node(header: str) -> str:
    """Return what the same job on one node asks: a partition may have but one of the kind."""
    return re.sub(r"^(#SBATCH --nodes=)\d+$", r"\g<1>1", header, flags=re.MULTILINE)


def _judged(where: str, launchers: Sequence[str], answer: _Answer, *, never: bool) -> Row:
    """Return the row of a dry submission.

    Args:
        never: all nodes are up, and none has what the job asks.
    """
    if answer.ok:
        return claims.dry_run(where, launchers, "", refused=False)
    told = "; ".join(words(answer.said)[-2:]).removeprefix("sbatch: ") or "sbatch said nothing"
    told += ", with all of its nodes up" if never else ""
    return claims.dry_run(where, launchers, told, True if never or cannot_run(answer.said) else None)


def _partitions(profile: ClusterProfile, survey: Survey, wanted: DiscoverOptions) -> list[str]:
    if wanted.partitions:
        return list(wanted.partitions)
    live = {one.name for one in survey.partitions}
    claimed = [name for name in profile.slurm.partitions if name in live]
    usual = [name for name in names_in(profile.slurm.partition) if name in live]
    return list(dict.fromkeys(name for name in [*usual, *claimed]))[:_MOST_PARTITIONS]


def _types_beside(profile: ClusterProfile, partitions: Sequence[str], wanted: DiscoverOptions) -> list[str]:
    """Return the node types that jobs get only by asking for them, of those partitions that are wanted."""
    covered = {destination(Placement(partition=name), profile).type_name for name in partitions}
    goes = {name: destination(Placement(node_type=name), profile) for name in profile.node_types}
    inside = [
        name
        for name, one in goes.items()
        if not wanted.partitions or set(names_in(one.partition)).intersection(wanted.partitions)
    ]
    return [name for name in inside if name not in covered][:_MOST_PARTITIONS]


def _header(
    context: Context,
    cluster: ActiveCluster,
    wanted: DiscoverOptions,
    placement: Placement,
    launcher: str,
    transport: str | None,
) -> str:
    """Return what a job of a launcher asks of Slurm in a place: on two nodes where it can be."""
    limits = destination(placement, cluster.profile).limits
    most = limits.max_nodes or 2
    error: DtslurmError | None = None
    for nodes in (2, 1) if most > 1 else (1,):
        request = replace(
            _request(cluster, wanted, transport, registry.load(launcher).configs),
            partition=placement.partition,
            node_type=placement.node_type,
            launcher=launcher,
            nodes=nodes,
            time="5",
        )
        try:
            script = prepare(context, request, standalone=True).submission.script
        except RequestInvalid as problem:
            error = error or problem
            continue
        lines = script.splitlines()
        return "\n".join([lines[0], *(line for line in lines if line.startswith("#SBATCH"))])
    raise error or RequestInvalid([f"no job of {launcher} fits {placement.partition or placement.node_type}"])


def _request(
    cluster: ActiveCluster, wanted: DiscoverOptions, transport: str | None, configs: Sequence[str] = ()
) -> JobRequest:
    script = f"{_SCRIPT}{configs[0] if configs else '.py'}"
    return JobRequest(
        script=script,
        payload={script: b"pass\n"},
        cluster=cluster.name,
        transport=transport,
        account=wanted.account,
        qos=wanted.qos,
        job_name="dtslurm-check",
        no_check=True,
        snapshot=False,
        sample=False,
        chdir="/tmp",  # noqa: S108 - the one folder that is on every node
    )


# ---- The network between two nodes ----


def _fabric(
    context: Context,
    cluster: ActiveCluster,
    wanted: DiscoverOptions,
    probes: Sequence[Probe],
    transport: str | None,
    say: Say,
) -> Row:
    expected = cluster.profile.fabric.expected_busbw_gbs if cluster.profile.fabric else None
    torch = [one.seen.get("torch") or {} for one in probes if one.seen]
    if not torch:
        return claims.bandwidth(expected, None, "no node was looked at")
    if not any(one.get("version") for one in torch):
        return claims.bandwidth(
            expected, None, f"needs torch, which {torch[0].get('python', 'python3')} lacks there"
        )
    partition = next(iter(wanted.partitions), None)
    request = replace(
        _request(cluster, wanted, transport), partition=partition, launcher="srun", nodes=2, time="10",
        fabric_check=True, ntasks_per_node=None if _has_gpus(cluster, partition) else 1,
        python=str(torch[0]["python"]),
    )  # fmt: skip
    try:
        record = submit(context, prepare(context, request, standalone=False))
    except DtslurmError as error:
        return claims.bandwidth(expected, None, "; ".join([error.message, *error.evidence][:2]))
    say(f"fabric check: job {record.job_id} on two nodes; waiting for {wanted.wait_s + 300:.0f} s at most")
    state = _ended(context, record, wanted.wait_s)
    if state:
        return claims.bandwidth(expected, None, state)
    try:
        data = cluster.transport.get(f"{record.run_dir}/fabric.json")
        result = answers.parse_object(data, "the fabric check")
        return claims.bandwidth(expected, float(result["busbw_gbs"]), str(result["problem"] or ""))
    except (DtslurmError, ValueError, LookupError, TypeError):
        return claims.bandwidth(
            expected, None, f"it measured nothing: dtslurm diagnose {record.job_id} tells why"
        )


def _has_gpus(cluster: ActiveCluster, partition: str | None) -> bool:
    own = destination(Placement(partition=partition), cluster.profile).node
    return own is not None and own.gpu_count > 0


def _ended(context: Context, record: JobRecord, wait_s: float) -> str:
    """Wait for a job's end; return why it has not come, after cancelling it."""
    try:
        return _waited(context, record, wait_s)
    except BaseException:  # nobody is left who would read what it measures
        with contextlib.suppress(DtslurmError):
            control.act(context, "cancel", [record.token], record.cluster)
        raise


def _waited(context: Context, record: JobRecord, wait_s: float) -> str:
    begin, started = context.clock(), None
    while True:
        (view,) = views(context, [record])
        if view.terminal:
            return ""
        now = context.clock()
        if started is None and any(status.start_time for status in view.statuses):
            started = now
        if now - (started or begin) > (300 if started else wait_s):
            reason = view.statuses[0].reason or view.statuses[0].word
            control.act(context, "cancel", [record.token], record.cluster)
            return f"job {record.job_id} did not {'end' if started else 'start'} in time ({reason})"
        context.sleep(_LOOK_S)


def lines(proof: Proof) -> Iterator[tuple[str, str, str, str]]:
    """Yield (verdict, what, claim, found), what differs first."""
    order = {"differs": 0, "unknown": 1, "ok": 2}
    for row in sorted(proof.rows, key=lambda row: order[row.verdict]):
        verdict = "notice" if row.verdict == "differs" and not row.fails else row.verdict
        yield verdict, row.what, row.claim, row.found
