"""``dtslurm exec`` and ``dtslurm profile``, which start programs inside a running job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option, parse_ranks
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.runs.profile import RankMemory, RankProfile
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.observe.inside.execute import CommandStreams, execute
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.wiring.context import Context

if TYPE_CHECKING:
    from dtslurm.services.observe.inside.nsys import NsysReport
    from dtslurm.services.observe.inside.profile import RecordedProfile, Tool


class _ExecCommand(click.Command):
    """A command whose options stand before or directly after the job; what follows is the user's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the job behind the options that follow it."""
        ctx.allow_interspersed_args = False
        if not ctx.resilient_parsing:
            job = len(args) - self._count_words(ctx, args)
            if job < len(args) and "--" not in args[:job]:
                others = [*args[:job], *args[job + 1 :]]
                command = len(others) - self._count_words(ctx, others)
                args = [*others[:command], args[job], *others[command:]]
        return super().parse_args(ctx, args)

    def _count_words(self, ctx: click.Context, args: list[str]) -> int:
        """Return the number of arguments from the first one that is no option on."""
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = parsed.get("command")
        return isinstance(parsed.get("job"), str) + (len(words) if isinstance(words, (list, tuple)) else 0)


@click.command("exec", cls=_ExecCommand)
@click.option(
    "--rank", "ranks", metavar="SET", help="Run it as these ranks, such as 0,3-7. [default: the lowest]"
)
@click.option("--node", metavar="HOST", help="Run it as the first rank on this node.")
@click.option("--role", metavar="NAME", help="Run it as the instances of this role; NAME/1 is instance 1.")
@click.option("--all", "all_ranks", is_flag=True, help="Run it as every rank.")
@click.option("-i", "--input", "has_input", is_flag=True, help="Pass the input of this command on to it.")
@cluster_option
@click.argument("job", metavar="JOB", shell_complete=completers.complete_jobs)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND...]")
def exec_(
    ranks: str | None,
    node: str | None,
    role: str | None,
    all_ranks: bool,
    has_input: bool,
    cluster: str | None,
    job: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND inside the running JOB, or open a shell there.

    It gets the environment, the working directory and the container of a rank, and shares its node and GPUs.
    The exit code is that of COMMAND.
    """
    given = [
        name for name, value in (("--rank", ranks), ("--node", node), ("--role", role)) if value is not None
    ]
    given += ["--all"] * all_ranks
    if len(given) > 1:
        raise RequestInvalid([f"{' and '.join(given)} exclude each other"])
    if has_input and sys.stdin is None:
        raise RequestInvalid(["--input: the input of this command is closed"])
    context = Context()
    record = find(context, job, cluster)
    target = ProcessSelector(ranks=parse_ranks(ranks), node=node, role=role, all_ranks=all_ranks)
    streams = CommandStreams(_write, sys.stdin.fileno() if has_input else None)
    sys.exit(execute(context, record, target, command, task=task_of(job, record), streams=streams))


def _write(out: bytes, err: bytes) -> None:
    for stream, data in ((sys.stdout, out), (sys.stderr, err)):
        if data:
            stream.flush()
            stream.buffer.write(data)
            stream.buffer.flush()


@click.command()
@click.option("--rank", "ranks", metavar="SET", help="Profile these ranks, such as 0,3-7. [default: all]")
@click.option("--role", metavar="NAME", help="Profile the instances of this role; NAME/1 is instance 1.")
@click.option(
    "--with",
    "tool",
    type=click.Choice(["py-spy", "torch", "memory", "nsys"]),
    default="py-spy",
    show_default=True,
    help="Observe Python stacks, record operations and kernels of steps, also memory, or what nsys records.",
)
@click.option(
    "--seconds", type=click.IntRange(1, 60), metavar="N", help="Observe for this long. [default: 10]"
)
@click.option(
    "--steps",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Record this many steps, with torch and memory. [default: 3]",
)
@click.option(
    "-o", "--output", "folder", metavar="DIR", help="Write the traces there. [default: profile-JOB-TIME]"
)
@click.option("-y", "--yes", is_flag=True, help="Restart the attempt for nsys without confirmation.")
@cluster_option
@json_option
@click.argument("job", metavar="JOB", shell_complete=completers.complete_jobs)
def profile(
    ranks: str | None,
    role: str | None,
    tool: Tool | Literal["nsys"],
    seconds: int | None,
    steps: int | None,
    folder: str | None,
    yes: bool,
    cluster: str | None,
    as_json: bool,
    job: str,
) -> None:
    """Profile ranks of the running JOB.

    It prints where each rank spends its time, and which rank the others wait for. The traces open in
    https://ui.perfetto.dev. py-spy must be installed in the environment of the job. With torch and memory,
    its training loop must call end_step of dtslurm.train; with torch, a job that was submitted with
    --env KINETO_USE_DAEMON=1 needs no call. Only nsys needs a restart of the attempt, and asks before.
    """
    from dtslurm.cli.nsys_restart import record_with_nsys
    from dtslurm.services.observe.inside.nsys import NsysTarget
    from dtslurm.services.observe.inside.profile import ProfileRequest, record_profiles

    unused = "steps" if tool in {"py-spy", "nsys"} else "seconds"
    if {"steps": steps, "seconds": seconds}[unused] is not None:
        raise RequestInvalid([f"--{unused} has no effect with {tool}"])
    if ranks is not None and role is not None:
        raise RequestInvalid(["--rank and --role exclude each other"])
    if tool == "nsys" and role is not None:
        raise RequestInvalid(["--role has no effect with nsys"], hint="choose ranks with --rank")
    context = Context()
    record = find(context, job, cluster)
    if tool == "nsys":
        nsys = NsysTarget(context=context, record=record, ranks=parse_ranks(ranks), task=task_of(job, record))
        reports = record_with_nsys(nsys, seconds or 10, yes=yes)
        path = _make_folder(context, record, folder)
        for report in reports:
            _write_report(context, report, path)
        _show_profiles(
            context, [report.profile for report in reports if report.profile], path, as_json=as_json
        )
        return
    target = ProcessSelector(ranks=parse_ranks(ranks), role=role, all_ranks=ranks is None and role is None)
    request = ProfileRequest(tool, (seconds or 10) if tool == "py-spy" else (steps or 3))
    recorded = record_profiles(context, record, target, request, task=task_of(job, record))
    _show_profiles(context, recorded, _make_folder(context, record, folder), as_json=as_json)


def _make_folder(context: Context, record: JobRecord, folder: str | None) -> Path:
    time = datetime.fromtimestamp(context.clock())
    path = context.cwd / (folder or f"profile-{record.job_id or record.name}-{time:%Y%m%d-%H%M%S}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def _write_report(context: Context, report: NsysReport, path: Path) -> None:
    """Write the report of nsys itself, which has more than the trace."""
    if report.kept:
        output.note(f"the report of rank {report.label} is large and stays on the cluster: {report.kept}")
    else:
        context.transport.put(report.report, str(path / f"{report.label}.{report.suffix}"))
    if report.profile is None:
        output.note(
            f"nsys could not export the report of rank {report.label}, so there is no trace and no row"
        )
    elif not report.has_gpu_work:
        output.note(f"nsys recorded no work of a GPU of rank {report.label}")


def _show_profiles(
    context: Context, recorded: Sequence[RecordedProfile], path: Path, *, as_json: bool
) -> None:
    """Write the traces, and print what they show."""
    from dtslurm.cli.printing.profile_rows import (
        MEMORY_COLUMNS,
        explain_straggler,
        memory_row,
        profile_columns,
        profile_row,
    )

    for item in recorded:
        name = f"{item.summary.label.replace('/', '-')}.json"
        context.transport.put(item.trace, str(path / name))
    summaries = [item.summary for item in recorded]
    if as_json:
        output.document(profiles=summaries, folder=str(path))
        return
    memories = [summary for summary in summaries if isinstance(summary, RankMemory)]
    profiles = [summary for summary in summaries if isinstance(summary, RankProfile)]
    if memories:
        output.table(MEMORY_COLUMNS, [memory_row(memory) for memory in memories])
    elif profiles:
        output.table(profile_columns(profiles), [profile_row(profile) for profile in profiles])
    if text := explain_straggler(profiles):
        output.say(text)
    output.note(f"traces, for https://ui.perfetto.dev: {path}")
