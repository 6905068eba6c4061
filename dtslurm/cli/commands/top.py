"""``dtslurm top``."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from typing import TYPE_CHECKING

import click

from dtslurm.cli.options import cluster_option, job_argument, json_option
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.services.runs.runs import find, recent
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.wiring.context import Context

if TYPE_CHECKING:
    from dtslurm.services.observe.compare import Comparison
    from dtslurm.services.observe.diagnose import Diagnosis
    from dtslurm.services.observe.live import Live


@click.command()
@click.option("--once", is_flag=True, help="Print one frame as text and exit. [default: without a terminal]")
@click.option(
    "--read-only", is_flag=True, help="Disable all changes: cancel, requeue, resubmit, hold, shell."
)
@click.option(
    "--ascii", "ascii_only", is_flag=True, help="Draw with ASCII. [default: if UTF-8 is not available]"
)
@click.option("--theme", metavar="NAME", help="Use theme textual-dark, textual-light, colour-blind, nord, …")
@click.option("--web", is_flag=True, help="Show it in your browser, at an address that opens once.")
@cluster_option
@json_option
@job_argument
def top(
    once: bool,
    read_only: bool,
    ascii_only: bool,
    theme: str | None,
    web: bool,
    cluster: str | None,
    as_json: bool,
    job: str | None,
) -> None:
    """Show your runs on all clusters live, or open JOB directly; ? lists the keys."""
    if web and (once or as_json):
        raise RequestInvalid([f"--web and {'--once' if once else '--json'} exclude each other"])
    context = Context()
    record = find(context, job, cluster) if job else None
    if cluster is not None and record is None:
        recent(context, 1, cluster)  # raises if there is no such cluster
    key = None
    if record is not None:
        task = task_of(job, record)
        key = record.token if task is None else f"{record.token}_{task}"
    if theme is not None:  # reject a wrong name also if nothing here has colors
        from dtslurm.dashboard.start import check_theme

        check_theme(theme)
    if web:
        _serve(read_only=read_only, ascii_only=ascii_only, theme=theme, cluster=cluster, job=job)
        return
    is_interactive = (
        sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") not in {None, "", "dumb"}
    )
    in_browser = bool(os.environ.get("TEXTUAL_DRIVER"))  # of `top --web`: it has no terminal
    if as_json or once or not (is_interactive or in_browser):
        _print_frame(context, cluster, key, as_json=as_json, ascii_only=ascii_only)
        return
    from dtslurm.dashboard.feed import Feed
    from dtslurm.dashboard.start import run

    feed = Feed(Context, _format_verdict, cluster=cluster, render_comparison=_format_comparison)
    run(feed, key=key, read_only=read_only, ascii_only=ascii_only, theme=theme, in_browser=in_browser)


def _serve(
    *, read_only: bool, ascii_only: bool, theme: str | None, cluster: str | None, job: str | None
) -> None:
    """Serve the dashboard to the user's browser until Ctrl-C."""
    try:
        from dtslurm.dashboard.web import serve
    except ModuleNotFoundError as error:
        raise RequestInvalid(
            [f"top --web needs the Python package textual-serve ({error})"],
            hint=f"{shlex.quote(sys.executable)} -m pip install 'dtslurm[web]'",
        ) from None
    options = ["--read-only"] * read_only + ["--ascii"] * ascii_only
    for name, value in (("--theme", theme), ("--cluster", cluster)):
        options += [] if value is None else [name, value]
    serve([*options, *([] if job is None else ["--", job])], _show_address)


def _show_address(address: str, port: int) -> None:
    output.say(address)
    output.note("open it in a browser, once; Ctrl-C ends the dashboard")
    if os.environ.get("SSH_CONNECTION"):
        host = socket.gethostname()
        output.note(f"from your machine, first: ssh -N -L {port}:127.0.0.1:{port} {host}")


def _format_comparison(comparison: Comparison) -> list[str]:
    from dtslurm.cli.commands import compare

    return compare.format_comparison(comparison, width=78)


def _format_verdict(verdict: Diagnosis | Live) -> list[str]:
    """Return the diagnosis of an ended job, or the verdict on a running job, as lines of text."""
    from dtslurm.cli.commands import diagnose
    from dtslurm.cli.printing import live
    from dtslurm.services.observe.diagnose import Diagnosis

    if isinstance(verdict, Diagnosis):
        return diagnose.format_diagnosis(verdict, width=78)
    return live.format_live_diagnosis(verdict, width=78)


def _print_frame(
    context: Context, cluster: str | None, key: str | None, *, as_json: bool, ascii_only: bool
) -> None:
    from dtslurm.dashboard import ascii_fallback, frame

    jobs_board = frame.query_board(Context, cluster)
    job_page = frame.page_of(context, jobs_board, key) if key is not None else None
    if as_json:
        output.document(
            taken_at=jobs_board.taken_at,
            clusters=jobs_board.clusters,
            jobs=jobs_board.rows,
            **({"job": job_page} if job_page else {}),
        )
        return
    width = shutil.get_terminal_size((100, 24)).columns
    use_ascii = ascii_only or ascii_fallback.ascii_only(sys.stdout.encoding)
    for line in frame.render_frame(jobs_board, job_page, key, width=max(20, width), now=context.clock()):
        output.say(ascii_fallback.to_ascii(line) if use_ascii else line)
