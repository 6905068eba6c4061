"""The dashboard as plain text, for pipes and for a single query; needs no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size

from dtslurm.dashboard import words
from dtslurm.dashboard.arrange import Arrangement, arrange
from dtslurm.dashboard.charts.plot import draw_bar, draw_curve
from dtslurm.errors import DtslurmError, JobNotFound
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.observe.run_list import (
    Board,
    ClusterKey,
    ClusterLine,
    ClusterReader,
    JobRow,
    Runs,
    add_page,
)
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import JobOutlook, Page, page

_PATIENCE_S = 20.0
_MAX_QUERIES = 8  # running jobs of a cluster whose progress is read
_COLUMNS = ("state", "name", "job", "cluster", "size", "time", "progress", "about")
_TITLES = ("STATE", "NAME", "JOB", "CLUSTER", "SIZE", "TIME/LIMIT", "DONE", "ABOUT")


def query_board(contexts: Callable[[], Context], cluster: str | None) -> Board:
    """Query all clusters in parallel, wait at most `_PATIENCE_S` seconds in total, and return the board.

    Raises:
        StoreError: the index of runs cannot be read.
    """
    context = contexts()
    records_by_cluster = Runs(context).by_cluster()
    results: dict[ClusterKey, tuple[tuple[JobRow, ...], ClusterLine]] = {}

    def query_cluster(key: ClusterKey, records: Sequence[JobRecord]) -> None:
        thread_context = contexts()
        rows, line = ClusterReader(thread_context, key[0]).read(records)
        results[key] = rows, line
        running_rows = [row for row in rows if row.state == "RUNNING" and row.recorded and not row.is_array][
            :_MAX_QUERIES
        ]
        pages = (
            {row.key: page_of_row(thread_context, row, None) for row in running_rows}
            if not line.trouble
            else {}
        )
        results[key] = tuple(add_page(row, pages.get(row.key)) for row in rows), line

    selected_records = {
        key: records for key, records in records_by_cluster.items() if cluster is None or key[0] == cluster
    }
    threads = [
        threading.Thread(target=query_cluster, args=item, daemon=True) for item in selected_records.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    rows: list[JobRow] = []
    lines = []
    for key, records in selected_records.items():
        if key in results:
            cluster_rows, line = results[key]
        else:
            cluster_rows = ClusterReader(context, key[0]).first(records)
            line = ClusterLine(name=key[0], trouble=f"no answer within {_PATIENCE_S:.0f} s")
        rows += cluster_rows
        lines.append(line)
    rows = list({row.key: row for row in rows}.values())  # two profiles of one cluster report the same jobs
    rows.sort(key=lambda row: -row.created)
    return Board(rows=tuple(rows), clusters=tuple(lines), taken_at=context.clock())


def page_of(context: Context, board: Board, key: str) -> Page:
    """Return the page of a job on the board.

    Raises:
        JobNotFound: the job is not on the board.
    """
    row = next((row for row in board.rows if row.key == key), None)
    if row is None:
        raise JobNotFound(f"no job {key!r} on the board")
    return page_of_row(context, row, None)


def page_of_row(context: Context, row: JobRow, attempt: int | None) -> Page:
    """Return the page of a job; an empty page with the error if its telemetry cannot be read."""
    key = row.key
    try:
        record = find(context, row.token)
        telemetry = read_telemetry(context, record, RunPart(attempt=attempt, task=row.task))
    except DtslurmError as error:
        return Page(key=key, trouble=error.message)
    return page(
        telemetry,
        key=key,
        taken_at=context.clock(),
        job=JobOutlook(limit_at=row.limit_at, has_ended=row.over, world_size=record.world_size),
    )


def render_frame(
    board: Board, job_page: Page | None, key: str | None, *, width: int, now: float
) -> list[str]:
    """Return the lines of the job list, or of one job's page."""
    if job_page is not None:
        row = next(row for row in board.rows if row.key == key)
        return [_truncate(line, width) for line in _render_job(row, job_page, width, now)]
    lines = [words.count_states(board)]
    rows = [words.format_job_cells(row, now) for row in arrange(board.rows, Arrangement())]
    table = [
        dict(zip(_COLUMNS, _TITLES, strict=True)),
        *({column: cell[0] for column, cell in cells.items()} for cells in rows),
    ]
    if rows:
        widths = {column: max(cell_len(row[column]) for row in table) for column in _COLUMNS}
        for row_cells in table:
            parts = [set_cell_size(row_cells[column], widths[column]) for column in _COLUMNS]
            lines.append("  ".join(parts).rstrip())
    cluster_lines = words.describe_clusters(board.clusters, now)
    lines += [text for text, kind in cluster_lines if kind != "dim"]
    return [_truncate(line, width) for line in lines]


def _render_job(row: JobRow, job_page: Page, width: int, now: float) -> list[str]:
    row = add_page(row, job_page)
    lines = [styled_text[0] for styled_text in words.format_header(row, job_page, now)]
    lines += [
        styled_text[0]
        for styled_text in words.describe_activity(row, f"dtslurm diagnose --live {row.job_id}")
    ]
    if job_page.trouble:
        lines.append(job_page.trouble)
    if job_page.forecast is not None:
        share = job_page.forecast.share
        lines += ["", *([draw_bar(share, min(60, width))] if share is not None else [])]
        lines += words.describe_forecast(job_page.forecast, job_page.now)
    states = [*words.describe_faults(job_page), *words.describe_roles(job_page, has_ended=row.over)]
    lines += ["", *(text for text, _ in states)] if states else []
    for title, points in words.select_curves(job_page, 2):
        lines += ["", title, *draw_curve(points, min(width, 80), 4)]
    outliers = words.describe_outliers(job_page) or [(words.list_outliers(job_page), "")]
    lines += ["", words.count_ranks(job_page), *(text for text, _ in outliers)]
    ranks = words.sort_failures_first(job_page.ranks)
    lines += [words.describe_rank(cell) for cell in ranks[:16]]
    if len(job_page.ranks) > 16:
        lines.append(f"and {len(job_page.ranks) - 16:,} more ranks")
    for cell in job_page.nodes[:16]:
        cells = words.format_node_cells(cell)
        lines.append(
            "  ".join(
                f"{key} {styled_text[0]}"
                for key, styled_text in cells.items()
                if styled_text[0] not in {"", "-"}
            )
        )
    lines += ["", *(styled_text[0] for styled_text in words.format_timeline(job_page, job_page.now)[-12:])]
    return lines


def _truncate(line: str, width: int) -> str:
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
