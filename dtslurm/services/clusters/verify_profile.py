"""Verifies a profile: dry-run submissions, probes of its nodes, and a network test between two nodes."""

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
from dtslurm.model.jobs.destination import choose_destination, split_names
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.options import Placement
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.scheduler.base import NodeLister
from dtslurm.scheduler.slurm_profile import complete
from dtslurm.services.clusters.discover import (
    DiscoverOptions,
    probe_node_types,
    survey_cluster,
)
from dtslurm.services.clusters.probing import Probe
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs import control
from dtslurm.services.runs.status import views
from dtslurm.services.submit.prepare import AUTO, prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import commands
from dtslurm.slurm.parse_errors import can_never_run, distinct_lines, lacks_nodes
from dtslurm.slurm.survey import Survey

_MAX_PARTITIONS = 12
_SUBMISSIONS_PER_COMMAND = 40  # dry-run submissions in one command
_POLL_S = 2.0
_SCRIPT_STEM = "check"

# Arguments: headers of batch scripts. Prints sbatch's exit code and output for each.
_DRY_RUN_SCRIPT = f"""\
{commands.LOGIN_PATH}
for script do
  said=$(printf '%s\\nexit 0\\n' "$script" | sbatch --test-only 2>&1)
  printf '\\036%s\\n%s\\n' "$?" "$said"
done
"""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome of the verification.

    Attributes:
        name: the cluster's name.
        rows: the verdict on each claim of the profile.
        notices: messages to the user.
        probes: the results of the probe jobs.
    """

    name: str
    rows: tuple[Row, ...]
    notices: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no claim was found to be wrong."""
        return not any(row.verdict == "differs" and row.fails for row in self.rows)


def verify_profile(
    context: Context,
    cluster: ActiveCluster,
    options: DiscoverOptions,
    *,
    launchers: Sequence[str] = (),
    transport: str | None = None,
    report_progress: Say = lambda _: None,
) -> Verification:
    """Compare a profile's claims with the cluster.

    Args:
        context: the environment and the clock.
        cluster: the cluster, with the profile to verify.
        options: what to probe, and how.
        launchers: dry-run jobs of these launchers; all launchers by default.
        transport: the way to the login node; None for the profile's choice.
        report_progress: receives progress messages.

    Raises:
        RequestInvalid, SlurmUnavailable, TransportError: see `survey_cluster`; or there is no such launcher.
    """
    for name in launchers:
        registry.load(name)
    survey = survey_cluster(cluster)
    profile = cluster.profile
    groups = kinds(survey.nodes)
    names = from_slurm.names_of(groups, profile)
    probes: tuple[Probe, ...] = ()
    discovered = from_slurm.facts_from_survey(survey, groups, profile)
    if options.probe:
        probes, probe_facts = probe_node_types(context, cluster, survey, options, profile, report_progress)
        discovered += probe_facts
    evidence = Evidence(
        survey=survey,
        kinds=groups,
        names=names,
        found=discovered,
        seen={outcome.name: outcome.seen for outcome in probes if outcome.seen},
    )
    rows = claims.judge(profile, evidence)
    if profile.default_launcher:
        rows.append(claims.launcher(profile.default_launcher, [*registry.names(), AUTO]))
    live_cluster = context.completed(
        cluster, complete(profile, survey.partitions, survey.nodes, survey.config), transport
    )
    rows += _run_dry_submissions(
        context, live_cluster, survey, options, launchers or registry.names(), transport
    )
    if options.fabric and options.probe:
        rows.append(_measure_fabric(context, live_cluster, options, probes, transport, report_progress))
    return Verification(name=cluster.name, rows=tuple(rows), notices=discovered.notices, probes=probes)


# ---- Dry-run submissions ----


def _run_dry_submissions(
    context: Context,
    cluster: ActiveCluster,
    survey: Survey,
    options: DiscoverOptions,
    launchers: Sequence[str],
    transport: str | None,
) -> list[Row]:
    """Dry-run jobs of all kinds with ``sbatch --test-only``; equal requests are submitted once."""
    launchers_by_request: dict[tuple[str, str], list[str]] = {}
    rows = []
    jobs = _list_jobs(cluster.profile, survey, options, launchers)
    partitions = {
        label: choose_destination(placement, cluster.profile).partition for label, placement, _ in jobs
    }
    for label, placement, launcher in jobs:
        try:
            header = _render_header(context, cluster, options, placement, launcher, transport)
        except DtslurmError as error:
            reason = "; ".join(getattr(error, "problems", ()) or [error.message])
            rows.append(claims.dry_run(label, [launcher], reason, is_refused=True))
            continue
        launchers_by_request.setdefault((label, header), []).append(launcher)
    answers_by_request = dict(
        zip(
            launchers_by_request,
            _submit_dry(cluster, [header for _, header in launchers_by_request]),
            strict=True,
        )
    )
    short_of_nodes = [key for key, answer in answers_by_request.items() if answer.lacks_nodes]
    one_node_answers = zip(
        short_of_nodes,
        _submit_dry(cluster, [_limit_to_one_node(header) for _, header in short_of_nodes]),
        strict=True,
    )
    still_short = [key for key, answer in one_node_answers if answer.lacks_nodes]
    all_up = {
        partition: _are_all_up(cluster, partition)
        for partition in {partitions[label] for label, _ in still_short}
    }
    impossible_keys = {key for key in still_short if all_up[partitions[key[0]]]}
    rows += [
        _judge_answer(key[0], launchers_by_request[key], answer, never_starts=key in impossible_keys)
        for key, answer in answers_by_request.items()
    ]
    return rows


def _list_jobs(
    profile: ClusterProfile, survey: Survey, options: DiscoverOptions, launchers: Sequence[str]
) -> list[tuple[str, Placement, str]]:
    """Return (label, placement, launcher) for every launcher in every partition.

    Node types that no partition defaults to get one job of one launcher.
    """
    partitions = _choose_partitions(profile, survey, options)
    jobs = [
        (f"partition {name}", Placement(partition=name), launcher)
        for name in partitions
        for launcher in launchers
    ]
    other_types = _list_explicit_types(profile, partitions, options)
    return jobs + [(f"node type {name}", Placement(node_type=name), launchers[0]) for name in other_types]


@dataclass(frozen=True)
class _Answer:
    """Slurm's answer to a dry-run submission."""

    ok: bool
    said: str

    @property
    def lacks_nodes(self) -> bool:
        """Whether Slurm found no nodes for the job."""
        return not self.ok and lacks_nodes(self.said)


def _submit_dry(cluster: ActiveCluster, headers: Sequence[str]) -> list[_Answer]:
    answers: list[_Answer] = []
    for start in range(0, len(headers), _SUBMISSIONS_PER_COMMAND):
        chunk = headers[start : start + _SUBMISSIONS_PER_COMMAND]
        argv = ["sh", "-c", _DRY_RUN_SCRIPT, "dtslurm-check", *chunk]
        for answer in cluster.transport.run(argv, timeout=150).stdout.split("\x1e")[1 : len(chunk) + 1]:
            exit_code, _, output = answer.partition("\n")
            answers.append(_Answer(exit_code.strip() == "0", output))
        answers += [_Answer(ok=False, said="")] * (start + len(chunk) - len(answers))
    return answers


def _are_all_up(cluster: ActiveCluster, partition: str | None) -> bool:
    """Return whether every node of a partition accepts jobs, so that a shortage now is permanent."""
    try:
        nodes = cluster.scheduler.nodes(partition) if isinstance(cluster.scheduler, NodeLister) else []
    except DtslurmError:
        return False  # unknown
    return bool(nodes) and all(node.usable for node in nodes)


def _limit_to_one_node(header: str) -> str:
    """Return the header of the same job on one node: a partition may have only one node of a type."""
    return re.sub(r"^(#SBATCH --nodes=)\d+$", r"\g<1>1", header, flags=re.MULTILINE)


def _judge_answer(label: str, launchers: Sequence[str], answer: _Answer, *, never_starts: bool) -> Row:
    """Return the row of a dry-run submission.

    Args:
        label: the label of the partition or node type.
        launchers: the launchers with this request.
        answer: Slurm's answer.
        never_starts: all nodes are up, and none has what the job requests.
    """
    if answer.ok:
        return claims.dry_run(label, launchers, "", is_refused=False)
    reason = "; ".join(distinct_lines(answer.said)[-2:]).removeprefix("sbatch: ") or "sbatch printed nothing"
    reason += ", although all of its nodes are up" if never_starts else ""
    return claims.dry_run(
        label, launchers, reason, True if never_starts or can_never_run(answer.said) else None
    )


def _choose_partitions(profile: ClusterProfile, survey: Survey, options: DiscoverOptions) -> list[str]:
    if options.partitions:
        return list(options.partitions)
    live_names = {partition.name for partition in survey.partitions}
    profile_names = [name for name in profile.slurm.partitions if name in live_names]
    from_profile = [name for name in split_names(profile.slurm.partition) if name in live_names]
    return list(dict.fromkeys(name for name in [*from_profile, *profile_names]))[:_MAX_PARTITIONS]


def _list_explicit_types(
    profile: ClusterProfile, partitions: Sequence[str], options: DiscoverOptions
) -> list[str]:
    """Return the node types of the selected partitions that a job gets only with ``--node-type``."""
    default_types = {choose_destination(Placement(partition=name), profile).type_name for name in partitions}
    destinations = {
        name: choose_destination(Placement(node_type=name), profile) for name in profile.node_types
    }
    eligible = [
        name
        for name, target in destinations.items()
        if not options.partitions or set(split_names(target.partition)).intersection(options.partitions)
    ]
    return [name for name in eligible if name not in default_types][:_MAX_PARTITIONS]


def _render_header(
    context: Context,
    cluster: ActiveCluster,
    options: DiscoverOptions,
    placement: Placement,
    launcher: str,
    transport: str | None,
) -> str:
    """Return the header of a launcher's job in a partition or on a node type: on two nodes if possible."""
    limits = choose_destination(placement, cluster.profile).limits
    max_nodes = limits.max_nodes or 2
    first_error: DtslurmError | None = None
    for nodes in (2, 1) if max_nodes > 1 else (1,):
        request = replace(
            _make_request(cluster, options, transport, registry.load(launcher).configs),
            partition=placement.partition,
            node_type=placement.node_type,
            launcher=launcher,
            nodes=nodes,
            time="5",
        )
        try:
            script = prepare(context, request, standalone=True).submission.script
        except RequestInvalid as problem:
            first_error = first_error or problem
            continue
        lines = script.splitlines()
        return "\n".join([lines[0], *(line for line in lines if line.startswith("#SBATCH"))])
    raise first_error or RequestInvalid(
        [f"no job of {launcher} fits {placement.partition or placement.node_type}"]
    )


def _make_request(
    cluster: ActiveCluster, options: DiscoverOptions, transport: str | None, configs: Sequence[str] = ()
) -> JobRequest:
    script = f"{_SCRIPT_STEM}{configs[0] if configs else '.py'}"
    return JobRequest(
        script=script,
        payload={script: b"pass\n"},
        cluster=cluster.name,
        transport=transport,
        account=options.account,
        qos=options.qos,
        job_name="dtslurm-check",
        no_check=True,
        snapshot=False,
        sample=False,
        chdir="/tmp",  # noqa: S108 - the only folder that exists on every node
    )


# ---- The network between two nodes ----


def _measure_fabric(
    context: Context,
    cluster: ActiveCluster,
    options: DiscoverOptions,
    probes: Sequence[Probe],
    transport: str | None,
    report_progress: Say,
) -> Row:
    expected_gbs = cluster.profile.fabric.expected_busbw_gbs if cluster.profile.fabric else None
    torch_facts = [outcome.seen.get("torch") or {} for outcome in probes if outcome.seen]
    if not torch_facts:
        return claims.bandwidth(expected_gbs, None, "no node was examined")
    if not any(facts.get("version") for facts in torch_facts):
        return claims.bandwidth(
            expected_gbs,
            None,
            f"the check needs torch, and {torch_facts[0].get('python', 'python3')} on the nodes does "
            "not have it",
        )
    partition = next(iter(options.partitions), None)
    request = replace(
        _make_request(cluster, options, transport), partition=partition, launcher="srun", nodes=2, time="10",
        fabric_check=True, ntasks_per_node=None if _has_gpus(cluster, partition) else 1,
        python=str(torch_facts[0]["python"]),
    )  # fmt: skip
    try:
        record = submit(context, prepare(context, request, standalone=False))
    except DtslurmError as error:
        return claims.bandwidth(expected_gbs, None, "; ".join([error.message, *error.evidence][:2]))
    report_progress(
        f"fabric check: job {record.job_id} on two nodes; waiting for {options.wait_s + 300:.0f} s at most"
    )
    timeout_reason = _ended(context, record, options.wait_s)
    if timeout_reason:
        return claims.bandwidth(expected_gbs, None, timeout_reason)
    try:
        content = cluster.transport.get(f"{record.run_dir}/fabric.json")
        measurement = answers.parse_object(content, "the fabric check")
        return claims.bandwidth(
            expected_gbs, float(measurement["busbw_gbs"]), str(measurement["problem"] or "")
        )
    except (DtslurmError, ValueError, LookupError, TypeError):
        return claims.bandwidth(
            expected_gbs,
            None,
            f"the job wrote no measurement; find the cause with dtslurm diagnose {record.job_id}",
        )


def _has_gpus(cluster: ActiveCluster, partition: str | None) -> bool:
    node = choose_destination(Placement(partition=partition), cluster.profile).node
    return node is not None and node.gpu_count > 0


def _ended(context: Context, record: JobRecord, wait_s: float) -> str:
    """Wait for a job's end; return why it did not end in time, after cancelling it; empty if it ended."""
    try:
        return _wait_for_end(context, record, wait_s)
    except BaseException:  # after an interrupt nothing would read the measurement
        with contextlib.suppress(DtslurmError):
            control.change_jobs(context, "cancel", [record.token], record.cluster)
        raise


def _wait_for_end(context: Context, record: JobRecord, wait_s: float) -> str:
    submitted_at, started_at = context.clock(), None
    while True:
        (view,) = views(context, [record])
        if view.terminal:
            return ""
        now = context.clock()
        if started_at is None and any(status.start_time for status in view.statuses):
            started_at = now
        if now - (started_at or submitted_at) > (300 if started_at else wait_s):
            reason = view.statuses[0].reason or view.statuses[0].word
            control.change_jobs(context, "cancel", [record.token], record.cluster)
            return f"job {record.job_id} did not {'end' if started_at else 'start'} in time ({reason})"
        context.sleep(_POLL_S)


def lines(proof: Verification) -> Iterator[tuple[str, str, str, str]]:
    """Yield (verdict, subject, claim, finding), contradicted claims first."""
    order = {"differs": 0, "unknown": 1, "ok": 2}
    for row in sorted(proof.rows, key=lambda row: order[row.verdict]):
        verdict = "notice" if row.verdict == "differs" and not row.fails else row.verdict
        yield verdict, row.what, row.claim, row.found
