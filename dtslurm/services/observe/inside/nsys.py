"""Profile ranks of a running job with NVIDIA's nsys, which can only observe programs that start below it.

The supervisor ends the attempt and begins a new one, in which `rank.sh` starts the chosen ranks below nsys. A
recording then begins and ends at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace

from dtslurm import assets
from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.profile import RankProfile
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.services.observe.inside.profile import (
    RankAnswers,
    RecordedProfile,
    ask_ranks,
    decode_base64,
    interpret_trace,
)
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.wiring.context import Context

_LARGEST_REPORT = 1 << 26  # bytes
_RESTART_S = 900.0  # for the new attempt to start all its ranks, and then for its first step
_WARM_UP_S = 60.0  # from the start of the ranks to the recording, if no steps of the run are known
_POLL_S = 5.0
# srun returns the highest exit code of its tasks: a reason against a restart prevails over the need of one.
_NOT_BELOW, _UNSUPERVISED, _MISSING = 64, 65, 127
_NOT_RECORDED = 4  # a rank does not run below nsys, see `dtslurm.worker.probe.nsys_record`
# The last of these commands try what the rank will do: a restart would have no effect if nsys cannot start.
_CHECK = """\
[ -z "${DTSLURM_NSYS_SESSION-}" ] || exit 0
cd "$DTSLURM_RUN_DIR" || exit
grep -qs 'supervisor nsys ' rank.sh task.sh ../../rank.sh ../../task.sh || exit 65
type nsys python3 >/dev/null 2>&1 || exit 127
for try in 1 2; do # as `dtslurm.worker.lib.start_below_nsys`
  session=dtslurm-check-$SLURM_JOB_ID-${RANK:-0}-$$-$try
  nsys launch --session-new="$session" --trace=cuda,nvtx true >&2 && exit 64
done
exit 66
"""


@dataclass(frozen=True, kw_only=True)
class NsysReport:
    """What nsys recorded of a rank.

    Attributes:
        label: the number of the rank.
        profile: the trace and its summary; None if nsys could not export its report there.
        report: the report, empty if it is too large and stays on the cluster.
        suffix: the suffix of the file of a report.
        kept: the path of the report on the cluster, empty if it was brought here.
    """

    label: str
    profile: RecordedProfile | None = None
    report: bytes = b""
    suffix: str = ""
    kept: str = ""

    @property
    def has_gpu_work(self) -> bool:
        """Whether a GPU is known to have worked for the rank."""
        summary = self.profile.summary if self.profile is not None else None
        return isinstance(summary, RankProfile) and any(
            summary.shares[kind] > 0 for kind in ("compute", "communication")
        )


@dataclass(frozen=True, kw_only=True)
class NsysTarget:
    """The ranks of a job that are to be profiled with nsys.

    Attributes:
        task: the task of a job array.
    """

    context: Context = field(repr=False)
    record: JobRecord
    ranks: tuple[tuple[int, int], ...] | None = None
    task: str | None = None

    @property
    def job(self) -> str:
        """The job as it is given to commands."""
        return self.record.job_id or self.record.name

    @property
    def run_dir(self) -> str:
        """The run directory of the run or of the array task."""
        return self.record.run_dir if self.task is None else f"{self.record.run_dir}/tasks/{self.task}"


def ranks_are_below_nsys(target: NsysTarget) -> bool:
    """Return whether the ranks run below nsys already; otherwise, a restart lets them do so.

    Raises:
        RequestInvalid: the job does not run, has no such ranks, has no supervisor, or no nsys.
        TransportError: the connection was lost, or nsys does not work there.
    """
    answer = _ask(target, ["sh", "-c", _CHECK, "dtslurm-check"])
    if answer.code == _UNSUPERVISED:
        raise RequestInvalid(
            [f"nsys needs a restart of the attempt, and job {target.job} has no supervisor that restarts it"],
            hint="submit the run with --max-restarts 3; --with py-spy and --with torch need no restart",
        )
    if answer.code == _MISSING:
        raise RequestInvalid(
            ["nsys is not on PATH where the ranks run"],
            hint="submit the run again with the module that has it: --module NAME",
        )
    if answer.code not in {0, _NOT_BELOW}:
        raise TransportError("nsys does not start where the ranks run", evidence=answer.problems)
    return answer.code == 0


def restart_below_nsys(target: NsysTarget) -> bool:
    """End the running attempt, and wait until the ranks of the next one train below nsys.

    Returns:
        Whether training has reported a step since; otherwise the ranks have run for a minute.

    Raises:
        RequestInvalid: the run has ended instead.
        TransportError: the connection was lost, or no attempt has begun.
    """
    context, run_dir = target.context, target.run_dir
    before = _look(target)
    if before.attempt is None:
        raise RequestInvalid(["the run has not started an attempt"])
    ranks = ["all"] if target.ranks is None else [
        str(rank) for first, last in target.ranks for rank in range(first, last + 1)
    ]  # fmt: skip
    transport = context.cluster_of(target.record).transport
    transport.put("".join(f"{rank}\n" for rank in ranks).encode(), f"{run_dir}/nsys-{before.attempt + 1}")
    transport.put(f"{before.attempt}\n".encode(), f"{run_dir}/restart")
    starts = _poll(target, before, "started its ranks")
    started = next(current for current in starts if _all_run(current, before))
    if before.train:
        if not started.train:
            next(current for current in _poll(target, started, "reported a step") if current.train)
        return True
    times = [rank.started for rank in started.ranks.values() if rank.started is not None]
    context.sleep(max(0.0, _WARM_UP_S - (started.now - min(times))))
    return False


def _look(target: NsysTarget, previous: RunTelemetry | None = None) -> RunTelemetry:
    part = RunPart(task=target.task)
    return read_telemetry(target.context, target.record, part, previous_telemetry=previous, points=1)


def _all_run(started: RunTelemetry, previous: RunTelemetry) -> bool:
    """Return whether all ranks of a later attempt run."""
    if started.attempt is None or started.attempt == previous.attempt:
        return False
    running = [rank for rank in started.ranks.values() if rank.running]
    return bool(running) and len(running) == started.world_size


def _poll(target: NsysTarget, previous: RunTelemetry, awaited: str) -> Iterator[RunTelemetry]:
    """Yield the state of the run every few seconds, with what is new in it, for as long as one may wait.

    Raises:
        RequestInvalid: the job has ended or was requeued.
        TransportError: the time to wait is over.
    """
    context = target.context
    hint = f"dtslurm status {target.job} shows what the job does"
    end = context.clock() + _RESTART_S
    while context.clock() < end:
        context.sleep(_POLL_S)
        previous = _look(target, previous)
        if any(event.get("event") == "ended" for event in previous.events):
            raise RequestInvalid(["the job has ended, or was requeued, instead"], hint=hint)
        yield previous
    raise TransportError(f"the new attempt has not {awaited} within {_RESTART_S / 60:.0f} min", hint=hint)


def record_ranks(target: NsysTarget, seconds: int) -> list[NsysReport]:
    """Return what nsys records of the ranks in the next seconds, the lowest rank first.

    Raises:
        RequestInvalid: the job or a rank does not run.
        TransportError: nsys failed, or the connection was lost.
    """
    program = assets.worker("probe/nsys_record.py").read_text("utf-8")
    answer = _ask(target, ["python3", "-c", program, str(seconds)])
    if answer.code:
        problems = answer.problems or [f"the command in the place of the ranks ended with {answer.code}"]
        hint = ""
        if answer.code == _NOT_RECORDED:
            hint = "nsys failed when the rank started, see the log of the rank; repeat the command"
        raise TransportError("the ranks cannot be profiled", evidence=problems, hint=hint)
    parts: dict[tuple[str, str], list[bytes]] = {}
    for label, line in answer.lines:
        word, _, piece = line.partition(b" ")
        parts.setdefault((label, word.decode("utf-8", "replace")), []).append(piece)
    reports: dict[str, NsysReport] = {}
    for (label, kind), pieces in parts.items():
        report = reports.get(label, NsysReport(label=label))
        reports[label] = _add(report, kind, decode_base64("nsys", b"".join(pieces)))
    for report in reports.values():
        if not report.report and not report.kept:
            raise answers.invalid("nsys", f"no report of rank {report.label}")
    return list(reports.values())


def _ask(target: NsysTarget, command: Sequence[str]) -> RankAnswers:
    selector = ProcessSelector(ranks=target.ranks, all_ranks=target.ranks is None)
    return ask_ranks(target.context, target.record, selector, command, task=target.task)


def _add(report: NsysReport, kind: str, content: bytes) -> NsysReport:
    """Return a report with one more part of it."""
    if kind == "trace":
        return replace(report, profile=interpret_trace("nsys", report.label, content) if content else None)
    if kind == "kept":
        text = content.decode("utf-8", "replace")
        return replace(report, kept="".join(filter(str.isprintable, text)))
    if kind not in {"nsys-rep", "qdstrm"} or len(content) > _LARGEST_REPORT:
        raise answers.invalid("nsys", f"a report of an unknown kind ({len(content)} bytes)")
    return replace(report, report=content, suffix=kind)
