"""The dashboard's texts as plain strings with a kind for each piece; pure functions of snapshots.

A kind is ``good``, ``bad``, ``warn``, ``dim``, ``accent``, ``bold`` or empty; `dtslurm.dashboard.theme` maps
it to a color.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from dtslurm.dashboard import ascii_fallback
from dtslurm.dashboard.charts.plot import draw_bar
from dtslurm.logs.clean import safe
from dtslurm.model.runs.telemetry import RankCell, TrainPoint
from dtslurm.presentation.quantities import METRIC_LABELS, duration, format_bytes_short, pluralize
from dtslurm.presentation.roles import describe_role
from dtslurm.presentation.states import STALLED, describe_first_failure
from dtslurm.services.observe.curves import join_attempts, restart_steps
from dtslurm.services.observe.run_list import Board, ClusterLine, JobRow
from dtslurm.views import events
from dtslurm.views.forecast import FEWEST_MOMENTS, Forecast, moments
from dtslurm.views.run_page import NodeCell, Page, drawable

StyledText = tuple[str, str]
_STATE_KINDS = {
    "RUNNING": "good", "COMPLETING": "good", "CONFIGURING": "good", "COMPLETED": "dim", "PENDING": "accent",
    "FAILED": "bad", "OUT_OF_MEMORY": "bad", "NODE_FAIL": "bad", "BOOT_FAIL": "bad", "TIMEOUT": "warn",
    "DEADLINE": "warn", "CANCELLED": "dim", "PREEMPTED": "warn", "UNKNOWN": "warn", "SUSPENDED": "warn",
    "REQUEUE_HOLD": "warn", "SPECIAL_EXIT": "warn",
}  # fmt: skip
RANK_KINDS = {
    "waiting": "dim", "running": "good", "done": "dim", "failed": "bad", "terminated": "dim", "lost": "bad",
}  # fmt: skip
_SHORT_STATES = {
    "OUT_OF_MEMORY": "OOM",
    "CONFIGURING": "CONFIG",
    "COMPLETING": "ENDING",
    "REQUEUE_HOLD": "HELD",
}
STALE_S = 60.0
_MAX_TIMESTAMP = 1e11


def format_state(row: JobRow) -> StyledText:
    """Return the state with its glyph; for a stalled job also how long it has been idle."""
    if row.stalled and row.activity is not None:
        return f"{ascii_fallback.STALLED} STALLED {duration(row.activity.quiet_s)}", "bad"
    label = _SHORT_STATES.get(row.state, row.state)
    return f"{ascii_fallback.STATES.get(row.state, '?')} {label}", _STATE_KINDS.get(row.state, "warn")


def measure_elapsed(row: JobRow, now: float) -> float | None:
    """Return the run's duration in seconds, see `dtslurm.services.runs.run_times`; None before its start."""
    if row.start is None:
        return None
    return max(0.0, (row.end if row.end is not None and row.over else now) - row.start)


def format_times(row: JobRow, now: float) -> str:
    """Return the elapsed time and the time limit as text."""
    elapsed_s = measure_elapsed(row, now)
    if elapsed_s is None:
        return f"-/{duration(row.limit)}" if row.limit else "-"
    has_limit = row.limit and not row.over and not row.requeued  # a requeue resets the time limit
    return f"{duration(elapsed_s)}/{duration(row.limit)}" if has_limit else duration(elapsed_s)


def format_size(row: JobRow) -> str:
    """Return the numbers of nodes and GPUs as text; of nodes and ranks if there are no GPUs."""
    nodes = f"{row.nodes}n" if row.nodes else "-"
    return f"{nodes} {row.gpus}g" if row.gpus else f"{nodes} {row.ranks or '?'}r"


def format_moment(moment: float, now: float) -> str:
    """Format a point in time as hours and minutes, with the day or date if it is not today."""
    if not 0 <= moment < _MAX_TIMESTAMP:  # not a plausible timestamp
        return "--:--"
    local_time, local_now = time.localtime(moment), time.localtime(now)
    if local_time[:3] == local_now[:3]:
        return time.strftime("%H:%M", local_time)
    return time.strftime("%a %H:%M" if abs(moment - now) < 6 * 86400 else "%Y-%m-%d %H:%M", local_time)


def describe_row(row: JobRow, now: float) -> StyledText:
    """Return why the job waits and its estimated start, or what its ranks do, or how it ended."""
    text = safe(row.about)
    if row.activity is not None and row.activity.summary and not row.over:
        return safe(row.activity.summary), "bad" if row.stalled else "warn"
    if row.pending and row.estimated_start and row.estimated_start > now:
        text = "; ".join(filter(None, (text, f"estimated start {format_moment(row.estimated_start, now)}")))
    forecast = row.forecast
    if forecast is not None and forecast.cut_at is not None and not forecast.stalled and not row.over:
        return describe_cut(forecast), "warn"
    if row.never:
        return f"{text}: it will never start as it is", "bad"
    return text, "bad" if row.over and not row.ok and row.state != "CANCELLED" else "dim" if row.over else ""


def describe_activity(row: JobRow, command: str) -> list[StyledText]:
    """Return the unusual activity of a job's ranks; for a stalled job with the command that inspects them."""
    if row.activity is None or not row.activity.summary:
        return []
    parts = safe(row.activity.summary).split("; ")
    if not row.stalled:
        return [("; ".join(parts), "warn")]
    return [(parts[0], "bad"), ("; ".join([f"{command} examines every rank", *parts[1:]]), "bad")]


def format_progress(row: JobRow) -> str:
    """Return the completed share of the training steps, or the step if their total is unknown."""
    forecast = row.forecast
    if forecast is None:
        return ""
    return f"{forecast.share:.0%}" if forecast.share is not None else f"{forecast.step:,.0f}"


def draw_progress(row: JobRow, now: float) -> StyledText:
    """Return a progress bar with the completed share and the remaining time.

    The share refers to the training steps if their total is known, else to the time limit; the text names
    which.
    """
    forecast = row.forecast
    if row.over or row.pending or row.is_array or row.unknown:
        return format_progress(row), "dim"
    if forecast is not None and forecast.share is not None:
        has_end = forecast.done_at is not None and not forecast.stalled
        remaining = f" {duration(max(0.0, (forecast.done_at or now) - now))}" if has_end else ""
        return (
            f"{draw_bar(forecast.share, 8)} {forecast.share:.0%} steps{remaining}",
            "warn" if forecast.stalled else "good",
        )
    if row.limit_at is None or not row.limit:
        return format_progress(row), ""
    remaining_s = max(0.0, row.limit_at - now)
    share = 1.0 - min(1.0, remaining_s / row.limit)
    return f"{draw_bar(share, 8)} {share:.0%} time {duration(remaining_s)}", "accent"


def suggest_command(row: JobRow) -> str:
    """Return the most useful next dtslurm command for a job."""
    job = safe(row.job_id) if row.job_id != "?" else safe(row.token)
    if row.stalled:
        return f"dtslurm diagnose --live {job}"
    if row.over and not row.ok and row.state != "CANCELLED":
        return f"dtslurm diagnose {job}"
    if row.over:
        return f"dtslurm report {job}"
    return f"dtslurm logs -f {job}" if row.state == "RUNNING" else f"dtslurm status {job}"


def describe_job(row: JobRow, now: float) -> list[StyledText]:
    """Return the lines about the selected job that stand above its loss curve."""
    state, kind = format_state(row)
    text, about_kind = describe_row(row, now)
    lines = [(f"{state}  {format_times(row, now)}", kind)]
    if text:
        lines.append((text, about_kind))
    if row.fix:
        lines.append((safe(row.fix), "warn"))
    if row.forecast is not None and not row.over:
        forecast_lines = describe_forecast(row.forecast, now)
        lines += [(forecast_lines[0], ""), *((line, "warn") for line in forecast_lines[1:])]
    nodes = safe(row.nodelist) or "no nodes yet"
    lines.append((f"{nodes}, {format_size(row)}, {pluralize(row.ranks, 'rank')}", "dim"))
    if row.created:
        lines.append((f"submitted {duration(max(0.0, now - row.created))} ago", "dim"))
    lines.append((f"next: {suggest_command(row)}", "accent"))
    return lines


def format_job_cells(row: JobRow, now: float, *, expanded: bool = False) -> dict[str, StyledText]:
    """Return the cells of a row of the job list by column."""
    name = safe(row.name)
    if row.is_array:
        name = f"{'▾' if expanded else '▸'} {name} ({sum(count for _, count in row.tasks)})"
    elif row.task is not None:
        name = f"  {name}[{row.task}]"
    kind = "dim" if row.over and row.ok else ""
    return {
        "state": format_state(row),
        "name": (name, kind or "bold"),
        "job": (safe(row.job_id), kind),
        "cluster": (safe(row.cluster), kind),
        "size": (format_size(row), kind),
        "time": (format_times(row, now), kind),
        "progress": (format_progress(row), kind),
        "about": describe_row(row, now),
    }


def describe_selected(row: JobRow, now: float) -> list[StyledText]:
    """Return two lines about the selected job: its size and nodes, then its state and the suggested fix."""
    text, kind = describe_row(row, now)
    nodes = safe(row.nodelist) or "no nodes yet"
    headline = (
        f"{safe(row.name)} {safe(row.job_id)} on {safe(row.cluster)}: {nodes}, {pluralize(row.ranks, 'rank')}"
    )
    if row.forecast is not None and not row.over and not row.stalled and row.forecast.cut_at is None:
        text = "; ".join(filter(None, (text, *describe_forecast(row.forecast, now)[:1])))
    if row.stalled:
        first_part, *parts = text.split("; ")
        text = "; ".join([first_part, "d examines every rank", *parts])
    if row.fix:
        text = f"{text}: {safe(row.fix)}"
    return [(headline, "dim"), (text, kind)]


def count_states(board: Board) -> str:
    """Return the number of jobs in each state as text."""
    order = ("RUNNING", STALLED, "PENDING", "FAILED", "COMPLETED")
    jobs_by_state: dict[str, int] = {}
    for row in board.rows:
        if not row.is_array:
            state = STALLED if row.stalled else row.state
            jobs_by_state[state] = jobs_by_state.get(state, 0) + 1
    states = [state for state in order if state in jobs_by_state] + sorted(set(jobs_by_state) - set(order))
    return (
        " · ".join(f"{jobs_by_state[state]} {state.lower().replace('_', ' ')}" for state in states)
        or "no runs yet"
    )


def describe_clusters(lines: Iterable[ClusterLine], now: float) -> list[StyledText]:
    """Return the reachability of each cluster, once for all profiles of a cluster."""
    return list(dict.fromkeys(describe_cluster(line, now) for line in lines))


def describe_cluster(line: ClusterLine, now: float) -> StyledText:
    """Return the reachability of a cluster and the age of its last answer as text."""
    name = safe(line.name)
    if line.observed_at is None:
        return (f"{name}: {safe(line.trouble)}", "bad") if line.trouble else (f"{name}: querying", "dim")
    age = max(0.0, now - line.observed_at)
    if line.trouble:
        problem = f"no answer for {duration(age)} ({safe(line.trouble)})"
        return f"{name}: {problem}; last known state", "bad"
    if age > STALE_S:
        return f"{name} {duration(age)} ago", "warn"
    return f"{name} ok", "dim"


def format_count(number: float) -> str:
    """Format a step or a count with thousands separators: ``41,200``."""
    return f"{number:,.0f}"


def describe_cut(forecast: Forecast) -> str:
    """Return the step at which the time limit will end the run, as text; empty if it will not."""
    if forecast.cut_at is None or forecast.total is None:
        return ""
    return f"will stop at step {format_count(forecast.cut_at)} of {format_count(forecast.total)}"


def describe_forecast(forecast: Forecast, now: float) -> list[str]:
    """Return a line with progress, pace and end, then a line for each problem.

    For a stalled run, the lines are the step and the time since that step.
    """
    step = f"step {format_count(forecast.step)}"
    if forecast.total is not None:
        step += f" of {format_count(forecast.total)} ({forecast.share or 0:.0%})"
    parts = [step]
    pace = ""
    if forecast.pace is not None:
        pace = f"{forecast.pace:.3g} steps/s" if forecast.pace >= 1 else f"{1 / forecast.pace:.3g} s a step"
    if forecast.stalled:
        suffix = f" (before: {pace})" if pace else ""
        return [step, f"no step for {duration(forecast.quiet_s)}, far longer than a step takes{suffix}"]
    if pace:
        parts.append(pace)
    if forecast.done_at is not None:
        parts.append(f"done in {duration(forecast.done_at - now)}")
    lines = [" · ".join(parts)]
    if forecast.cut_at is not None:
        lines.append(f"{describe_cut(forecast)}, at the time limit")
    return lines


def describe_rank(cell: RankCell) -> str:
    """Return one line with the state of a rank and its newest measurements."""
    parts = [f"rank {cell.rank}: {cell.state}"]
    if cell.host:
        parts.append(f"on {safe(cell.host)}")
    if cell.pid:
        parts.append(f"pid {cell.pid}")
    if cell.gpu is not None:
        parts.append(f"GPU {cell.gpu:.0f} %")
    if cell.memory is not None:
        parts.append(f"GPU memory {cell.memory:.0%}")
    if cell.silent is not None:
        parts.append(f"last output {duration(cell.silent)} ago")
    parts.append(f"log {format_bytes_short(cell.size)}")
    if cell.deviation:
        parts.append(safe(cell.deviation))
    return " · ".join(parts)


def wrap_text(text: str, width: int, max_lines: int) -> list[str]:
    """Wrap a text at ``·`` separators into ``max_lines`` lines or fewer; the last may exceed the width."""
    lines = [""]
    for segment in text.split(" · "):
        longer_line = f"{lines[-1]} · {segment}" if lines[-1] else segment
        if len(longer_line) <= width or not lines[-1] or len(lines) == max_lines:
            lines[-1] = longer_line
        else:
            lines.append(segment)
    return lines


def count_ranks(page: Page) -> str:
    """Return the number of ranks in each state as text."""
    ranks_by_state = Counter(cell.state for cell in page.ranks)
    return " · ".join(f"{number:,} {state}" for state, number in ranks_by_state.items()) or "no ranks yet"


def format_rank_line(page: Page) -> tuple[str, str, str]:
    """Return the parts of the line above the ranks before and after the column names, and its kind."""
    if page.first_failure is not None:
        return (
            f"{safe(describe_first_failure(page.first_failure, page.ranks))} · {count_ranks(page)}",
            "",
            "bad",
        )
    return count_ranks(page), list_outliers(page), "warn" if page.outliers else "dim"


def sort_failures_first(cells: Sequence[RankCell]) -> tuple[RankCell, ...]:
    """Sort the first failed rank first, then the other failed ranks, then the rest, each in rank order.

    The order is unchanged if no rank is known to have failed first.
    """
    if not any(cell.failed_first for cell in cells):
        return tuple(cells)
    return tuple(sorted(cells, key=lambda cell: (not cell.failed_first, cell.state != "failed")))


def describe_empty_pane(content: str, page: Page, *, has_ended: bool) -> str:
    """Return the text of an empty pane: an error, that nothing was recorded, or nothing so far."""
    if page.trouble:
        return f"no {content}: {safe(page.trouble)}"
    return f"no {content}" if has_ended else f"no {content} yet"


def describe_faults(page: Page) -> list[StyledText]:
    """Return a line for a loss that is no number, and for ranks that train apart; empty without a fault."""
    lines = []
    if page.loss_diverged_at is not None:
        lines.append((f"the loss is no number since step {page.loss_diverged_at}", "bad"))
    if page.ranks_apart is not None:
        lines.append((safe(page.ranks_apart.text), "bad" if page.ranks_apart.is_fault else "dim"))
    return lines


def describe_roles(page: Page, *, has_ended: bool) -> list[StyledText]:
    """Return a line for each role beside the ranks: its instances, restarts and load."""
    lines = []
    for role in page.roles:
        has_failed = any(instance.state == "failed" for instance in role.active)
        is_ready = role.ready_count == len(role.active)
        kind = "bad" if has_failed else "dim" if has_ended else "good" if is_ready else "warn"
        lines.append((f"{role.name}: {safe(describe_role(role, has_ended=has_ended))}", kind))
    return lines


def describe_outliers(page: Page) -> list[StyledText]:
    """Return the first failure, else the outlier ranks; empty if there are none."""
    if page.first_failure is not None:
        return [(safe(describe_first_failure(page.first_failure, page.ranks)), "bad")]
    return [(list_outliers(page), "warn")] if page.outliers else []


def list_outliers(page: Page, max_count: int = 3) -> str:
    """Return the first ``max_count`` outlier ranks with the reason for each, as text."""
    outliers = page.outliers
    descriptions = [f"{cell.rank} {safe(cell.deviation)}" for cell in outliers[:max_count]]
    suffix = f" and {len(outliers) - max_count} more" if len(outliers) > max_count else ""
    return f"outliers: {'; '.join(descriptions)}{suffix}" if outliers else "no outliers"


def format_percent(value: float | None, *, of_one: bool = False) -> str:
    """Format a percentage, or a share of 1 if ``of_one``; ``-`` if it is unknown."""
    if value is None:
        return "-"
    return f"{value * (100 if of_one else 1):.0f}%"


def format_node_cells(cell: NodeCell) -> dict[str, StyledText]:
    """Return the cells of a row of the node list by column."""
    stale_kind = "dim" if cell.age > STALE_S else ""
    temperature_kind = "bad" if (cell.temperature or 0) >= 85 else stale_kind
    disk_share = max((share for _, share in cell.disks), default=None)
    gpus = " ".join("-" if gpu.util is None else f"{gpu.util:.0f}" for gpu in cell.gpus)
    alarm_text = "; ".join(cell.alarms)
    if stale_kind:
        alarm_text = "; ".join(filter(None, (alarm_text, f"last sample {duration(cell.age)} ago")))
    return {
        "node": (safe(cell.name), "bold"),
        "gpu": (format_percent(cell.gpu), _rate_utilization(cell.gpu) or stale_kind),
        "gpus": (gpus, stale_kind),
        "memory": (format_percent(cell.gpu_memory, of_one=True), stale_kind),
        "heat": ("-" if cell.temperature is None else f"{cell.temperature:.0f}°", temperature_kind),
        "cpu": (format_percent(cell.cpu), stale_kind),
        "ram": (format_percent(cell.memory, of_one=True), "bad" if (cell.memory or 0) > 0.95 else stale_kind),
        "rx": ("-" if cell.receives is None else format_bytes_short(cell.receives), stale_kind),
        "tx": ("-" if cell.sends is None else format_bytes_short(cell.sends), stale_kind),
        "disk": (format_percent(disk_share, of_one=True), "bad" if (disk_share or 0) > 0.95 else stale_kind),
        "about": (alarm_text, "bad" if alarm_text else ""),
    }


def _rate_utilization(use: float | None) -> str:
    return "" if use is None else "good" if use >= 60 else "warn" if use >= 20 else "bad"


def format_header(row: JobRow, page: Page | None, now: float) -> list[StyledText]:
    """Return the two lines above a job's page."""
    state, kind = format_state(row)
    job = f"{safe(row.name)}  {safe(row.job_id)} on {safe(row.cluster)}"
    attempt = page.attempt if page is not None else row.attempt
    nodes = f" · {pluralize(row.ranks, 'rank')} on {safe(row.nodelist) or format_size(row)}"
    elapsed_s = measure_elapsed(row, now)
    details = f"attempt {attempt} · " + (f"parent run {safe(row.parent)} · " if row.parent else "")
    if page is not None and attempt < max(page.attempts, default=attempt):
        details += f"ended, attempt {max(page.attempts)} is the newest"
    elif elapsed_s is None:
        details += "ended · " if page is not None and page.attempts else ""
        details += f"{describe_row(row, now)[0] or 'not started'}"
    else:
        limit = f" of {duration(row.limit)}" if row.limit and not row.requeued else ""
        details += f"{duration(elapsed_s)}{limit}"
        if (row.over or row.pending) and row.about:
            details += f" · {safe(row.about)}"
    return [(f"{state}  {job}{nodes}", kind), (details, "dim")]


def format_timeline(page: Page, now: float) -> list[StyledText]:
    """Return all events of the run, oldest first."""
    lines = [
        (
            f"{format_moment(event.time, now) if event.time is not None else '--:--':>5}  {safe(event.text)}",
            "bad" if event.bad else "",
        )
        for event in events.lines(page.events)
    ]
    return lines or [("no events yet", "dim")]


METRICS = ("loss", "tokens_per_s", "tflops_per_gpu", "step_time_s", "grad_norm", "learning_rate")
_TITLES = {**METRIC_LABELS, "step_time_s": "s a step"}  # the value follows: "s a step 0.31"
RATES = {"tokens_per_s", "tflops_per_gpu", "step_time_s"}


def format_short(value: float, digits: int = 3) -> str:
    """Format a number in few characters: ``0.213``, ``407.4k``, ``3e-04``."""
    unit = ""
    if 1e4 <= abs(value) < 1e15:
        power = min(4, int(math.log10(abs(value) * 1.0001)) // 3)
        unit, value = "kMGT"[power - 1], value / 1000**power
    is_plain = 100 <= abs(value) < 1e4  # show four digits instead of an exponent
    return f"{value:.{max(4, digits) if is_plain else digits}g}{unit}"


Attempts = Mapping[int, Sequence[TrainPoint]]


def select_attempts(page: Page, earlier: Attempts) -> Attempts:
    """Return the training metrics of all attempts up to the page's attempt, oldest first."""
    return {
        **{number: earlier[number] for number in sorted(earlier) if number < page.attempt},
        page.attempt: page.points,
    }


def find_restarts(page: Page, earlier: Attempts) -> list[float]:
    """Return the first steps of the attempts whose curves continue those of an earlier attempt."""
    return [float(step) for step in restart_steps(select_attempts(page, earlier)).values()]


def select_curves(
    page: Page, max_curves: int, earlier: Attempts | None = None
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the curves to draw with their titles: the loss, a throughput, then the other metrics.

    Args:
        max_curves: maximum number of curves.
        earlier: metrics of attempts before the page's, which are joined with the page's.
    """
    titled_curves = []
    attempts = select_attempts(page, earlier or {})
    suffix = ", before it stalled" if page.forecast is not None and page.forecast.stalled else ""
    for key in METRICS:
        points = page.series(key)
        if len(attempts) > 1:
            points = [(float(step), value) for step, value in join_attempts(attempts.values(), key)]
        if points:
            last_value = points[-1][1]
            titled_curves.append(
                (f"{_TITLES[key]} {format_short(last_value, 4)}{suffix if key in RATES else ''}", points)
            )
    if len(titled_curves) < 2 and (pace := measure_steps_per_second(page.points)):
        titled_curves.append((f"steps/s {format_short(pace[-1][1])}{suffix}", pace))
    return titled_curves[:max_curves]


def measure_steps_per_second(points: Sequence[TrainPoint]) -> list[tuple[float, float]]:
    """Return (step, steps per second) pairs from the steps' times, for runs that report no throughput."""
    times_and_steps = [
        (float(point.time), float(point.step))
        for point in points
        if point.time is not None and point.step is not None and drawable(point.time)
    ]
    times_and_steps = moments(times_and_steps)
    if len(times_and_steps) < FEWEST_MOMENTS:
        return []
    samples = times_and_steps[:: max(1, len(times_and_steps) // 200)]
    return [
        (step, (step - previous_step) / (moment - previous_moment))
        for (previous_moment, previous_step), (moment, step) in pairwise(samples)
        if moment > previous_moment and step >= previous_step
    ]
