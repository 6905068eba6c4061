"""The dashboard as plain text, for pipes and for a single query; needs no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size

from dtslurm.dashboard import words
from dtslurm.dashboard.arrange import Arrangement, arrange
from dtslurm.dashboard.charts.plot import bar, curve
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
from dtslurm.services.observe.telemetry import read_telemetry
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import Page, page

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
    answers: dict[ClusterKey, tuple[tuple[JobRow, ...], ClusterLine]] = {}

    def query_cluster(key: ClusterKey, records: Sequence[JobRecord]) -> None:
        thread_context = contexts()
        rows, line = ClusterReader(thread_context, key[0]).read(records)
        answers[key] = rows, line
        running_rows = [row for row in rows if row.state == "RUNNING" and row.recorded and not row.is_array][
            :_MAX_QUERIES
        ]
        pages = (
            {row.key: page_of_row(thread_context, row, None) for row in running_rows}
            if not line.trouble
            else {}
        )
        answers[key] = tuple(add_page(row, pages.get(row.key)) for row in rows), line

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
        if key in answers:
            cluster_rows, line = answers[key]
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
        telemetry = read_telemetry(context, record, task=row.task, attempt=attempt)
    except DtslurmError as error:
        return Page(key=key, trouble=error.message)
    return page(
        telemetry,
        key=key,
        taken_at=context.clock(),
        limit_at=row.limit_at,
        has_ended=row.over,
        world_size=record.world_size,
    )


def render_frame(board: Board, shown: Page | None, key: str | None, *, width: int, now: float) -> list[str]:
    """Return the lines of the job list, or of one job's page."""
    if shown is not None:
        row = next(row for row in board.rows if row.key == key)
        return [_truncate(line, width) for line in _render_job(row, shown, width, now)]
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
    cluster_pieces = [words.describe_cluster(line, now) for line in board.clusters]
    lines += [text for text, kind in cluster_pieces if kind != "dim"]
    return [_truncate(line, width) for line in lines]


def _render_job(row: JobRow, shown: Page, width: int, now: float) -> list[str]:
    row = add_page(row, shown)
    lines = [piece[0] for piece in words.format_header(row, shown, now)]
    lines += [piece[0] for piece in words.describe_activity(row, f"dtslurm diagnose --live {row.job_id}")]
    if shown.trouble:
        lines.append(shown.trouble)
    if shown.forecast is not None:
        share = shown.forecast.share
        lines += ["", *([bar(share, min(60, width))] if share is not None else [])]
        lines += words.describe_forecast(shown.forecast, shown.now)
    for title, points in words.curves(shown, 2):
        lines += ["", title, *curve(points, min(width, 80), 4)]
    outliers = words.describe_outliers(shown) or [(words.list_outliers(shown), "")]
    lines += ["", words.rank_counts(shown), *(text for text, _ in outliers)]
    ranks = words.sort_failures_first(shown.ranks)
    lines += [words.describe_rank(cell) for cell in ranks[:16]]
    if len(shown.ranks) > 16:
        lines.append(f"and {len(shown.ranks) - 16:,} more ranks")
    for cell in shown.nodes[:16]:
        cells = words.format_node_cells(cell)
        lines.append(
            "  ".join(f"{key} {piece[0]}" for key, piece in cells.items() if piece[0] not in {"", "-"})
        )
    lines += ["", *(piece[0] for piece in words.format_timeline(shown, shown.now)[-12:])]
    return lines


def _truncate(line: str, width: int) -> str:
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
