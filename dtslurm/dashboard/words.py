"""What the dashboard says, as plain text with the kind of each piece: pure functions of snapshots.

A kind is ``good``, ``bad``, ``warn``, ``dim``, ``accent``, ``bold`` or empty; its colour is the theme's
business.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from dtslurm.dashboard import ascii_fallback
from dtslurm.dashboard.charts.plot import bar
from dtslurm.logs.clean import safe
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.model.units import duration, pluralize
from dtslurm.services.observe.curves import join_attempts, restart_steps
from dtslurm.services.observe.run_list import Board, ClusterLine, JobRow
from dtslurm.services.runs.status import STALLED
from dtslurm.views import events
from dtslurm.views.forecast import FEWEST_MOMENTS, Forecast, moments
from dtslurm.views.run_page import NodeCell, Page, RankCell, drawable, failure_words

Piece = tuple[str, str]
_KINDS = {
    "RUNNING": "good", "COMPLETING": "good", "CONFIGURING": "good", "COMPLETED": "dim", "PENDING": "accent",
    "FAILED": "bad", "OUT_OF_MEMORY": "bad", "NODE_FAIL": "bad", "BOOT_FAIL": "bad", "TIMEOUT": "warn",
    "DEADLINE": "warn", "CANCELLED": "dim", "PREEMPTED": "warn", "UNKNOWN": "warn", "SUSPENDED": "warn",
    "REQUEUE_HOLD": "warn", "SPECIAL_EXIT": "warn",
}  # fmt: skip
RANK_KINDS = {
    "waiting": "dim", "running": "good", "done": "dim", "failed": "bad", "terminated": "dim", "lost": "bad",
}  # fmt: skip
_SHORT = {"OUT_OF_MEMORY": "OOM", "CONFIGURING": "CONFIG", "COMPLETING": "ENDING", "REQUEUE_HOLD": "HELD"}
STALE_S = 60.0
_LATEST = 1e11


def state_piece(row: JobRow) -> Piece:
    """Return the state with its glyph; of a stalled job for how long it has done nothing."""
    if row.stalled and row.activity is not None:
        return f"{ascii_fallback.STALLED} STALLED {duration(row.activity.quiet_s)}", "bad"
    word = _SHORT.get(row.state, row.state)
    return f"{ascii_fallback.STATES.get(row.state, '?')} {word}", _KINDS.get(row.state, "warn")


def elapsed(row: JobRow, now: float) -> float | None:
    """Return the duration of a run, see `dtslurm.services.runs.run_times`."""
    if row.start is None:
        return None
    return max(0.0, (row.end if row.end is not None and row.over else now) - row.start)


def time_words(row: JobRow, now: float) -> str:
    """Return elapsed time against the limit."""
    span = elapsed(row, now)
    if span is None:
        return f"-/{duration(row.limit)}" if row.limit else "-"
    counts = row.limit and not row.over and not row.requeued  # a requeue starts the time limit anew
    return f"{duration(span)}/{duration(row.limit)}" if counts else duration(span)


def size_words(row: JobRow) -> str:
    """Return nodes and GPUs, or ranks where there are no GPUs."""
    nodes = f"{row.nodes}n" if row.nodes else "-"
    return f"{nodes} {row.gpus}g" if row.gpus else f"{nodes} {row.ranks or '?'}r"


def at(moment: float, now: float) -> str:
    """Return a point in time as people say it: the clock, and the day if it is another one."""
    if not 0 <= moment < _LATEST:  # no clock of a cluster says so
        return "--:--"
    then, today = time.localtime(moment), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if abs(moment - now) < 6 * 86400 else "%Y-%m-%d %H:%M", then)


def about_words(row: JobRow, now: float) -> Piece:
    """Return the reason it waits with the scheduler's estimate, or how it ended."""
    text = safe(row.about)
    if row.activity is not None and row.activity.summary and not row.over:
        return safe(row.activity.summary), "bad" if row.stalled else "warn"
    if row.pending and row.estimated_start and row.estimated_start > now:
        text = "; ".join(filter(None, (text, f"estimated start {at(row.estimated_start, now)}")))
    told = row.forecast
    if told is not None and told.cut_at is not None and not told.stalled and not row.over:
        return cut_words(told), "warn"
    if row.never:
        return f"{text}: it will never start as it is", "bad"
    return text, "bad" if row.over and not row.ok and row.state != "CANCELLED" else "dim" if row.over else ""


def activity_words(row: JobRow, command: str) -> list[Piece]:
    """Return what the ranks of a job do where that is unusual, and of a stalled job how to look at them."""
    if row.activity is None or not row.activity.summary:
        return []
    parts = safe(row.activity.summary).split("; ")
    if not row.stalled:
        return [("; ".join(parts), "warn")]
    return [(parts[0], "bad"), ("; ".join([f"{command} looks at every rank", *parts[1:]]), "bad")]


def progress_words(row: JobRow) -> str:
    """Return how much is done."""
    told = row.forecast
    if told is None:
        return ""
    return f"{told.share:.0%}" if told.share is not None else f"{told.step:,.0f}"


def progress_bar(row: JobRow, now: float) -> Piece:
    """Return a bar, the share that is done and the time that is left.

    The share is of the training steps where their total is known, else of the time limit; the text says
    which.
    """
    told = row.forecast
    if row.over or row.pending or row.is_array or row.unknown:
        return progress_words(row), "dim"
    if told is not None and told.share is not None:
        known = told.done_at is not None and not told.stalled
        left = f" {duration(max(0.0, (told.done_at or now) - now))}" if known else ""
        return f"{bar(told.share, 8)} {told.share:.0%} steps{left}", "warn" if told.stalled else "good"
    if row.limit_at is None or not row.limit:
        return progress_words(row), ""
    rest = max(0.0, row.limit_at - now)
    share = 1.0 - min(1.0, rest / row.limit)
    return f"{bar(share, 8)} {share:.0%} time {duration(rest)}", "accent"


def next_command(row: JobRow) -> str:
    """Return the command that a user would type next about a job."""
    job = safe(row.job_id) if row.job_id != "?" else safe(row.token)
    if row.stalled:
        return f"dtslurm diagnose --live {job}"
    if row.over and not row.ok and row.state != "CANCELLED":
        return f"dtslurm diagnose {job}"
    if row.over:
        return f"dtslurm report {job}"
    return f"dtslurm logs -f {job}" if row.state == "RUNNING" else f"dtslurm status {job}"


def facts(row: JobRow, now: float) -> list[Piece]:
    """Return the lines on the chosen job that stand above its loss curve."""
    state, kind = state_piece(row)
    text, about_kind = about_words(row, now)
    lines = [(f"{state}  {time_words(row, now)}", kind)]
    if text:
        lines.append((text, about_kind))
    if row.fix:
        lines.append((safe(row.fix), "warn"))
    if row.forecast is not None and not row.over:
        told = forecast_words(row.forecast, now)
        lines += [(told[0], ""), *((line, "warn") for line in told[1:])]
    where = safe(row.nodelist) or "no nodes yet"
    lines.append((f"{where}, {size_words(row)}, {pluralize(row.ranks, 'rank')}", "dim"))
    if row.created:
        lines.append((f"submitted {duration(max(0.0, now - row.created))} ago", "dim"))
    lines.append((f"next: {next_command(row)}", "accent"))
    return lines


def job_cells(row: JobRow, now: float, *, expanded: bool = False) -> dict[str, Piece]:
    """Return the cells of a row of the job list by column."""
    name = safe(row.name)
    if row.is_array:
        name = f"{'▾' if expanded else '▸'} {name} ({sum(count for _, count in row.tasks)})"
    elif row.task is not None:
        name = f"  {name}[{row.task}]"
    kind = "dim" if row.over and row.ok else ""
    return {
        "state": state_piece(row),
        "name": (name, kind or "bold"),
        "job": (safe(row.job_id), kind),
        "cluster": (safe(row.cluster), kind),
        "size": (size_words(row), kind),
        "time": (time_words(row, now), kind),
        "progress": (progress_words(row), kind),
        "about": about_words(row, now),
    }


def detail(row: JobRow, now: float) -> list[Piece]:
    """Return two lines on the chosen job: what it does, and why or what to do."""
    text, kind = about_words(row, now)
    nodes = safe(row.nodelist) or "no nodes yet"
    first = (
        f"{safe(row.name)} {safe(row.job_id)} on {safe(row.cluster)}: {nodes}, {pluralize(row.ranks, 'rank')}"
    )
    if row.forecast is not None and not row.over and not row.stalled and row.forecast.cut_at is None:
        text = "; ".join(filter(None, (text, *forecast_words(row.forecast, now)[:1])))
    if row.stalled:
        first_part, *parts = text.split("; ")
        text = "; ".join([first_part, "d looks at every rank", *parts])
    if row.fix:
        text = f"{text}: {safe(row.fix)}"
    return [(first, "dim"), (text, kind)]


def counts(board: Board) -> str:
    """Return how many jobs are in which state."""
    order = ("RUNNING", STALLED, "PENDING", "FAILED", "COMPLETED")
    found: dict[str, int] = {}
    for row in board.rows:
        if not row.is_array:
            word = STALLED if row.stalled else row.state
            found[word] = found.get(word, 0) + 1
    words = [word for word in order if word in found] + sorted(set(found) - set(order))
    return " · ".join(f"{found[word]} {word.lower().replace('_', ' ')}" for word in words) or "no runs yet"


def cluster_words(line: ClusterLine, now: float) -> Piece:
    """Return how a cluster answers."""
    name = safe(line.name)
    if line.observed_at is None:
        return (f"{name}: {safe(line.trouble)}", "bad") if line.trouble else (f"{name}: asking", "dim")
    age = max(0.0, now - line.observed_at)
    if line.trouble:
        return f"{name}: no answer for {duration(age)} ({safe(line.trouble)}), shown as it was then", "bad"
    if age > STALE_S:
        return f"{name} {duration(age)} ago", "warn"
    return f"{name} ok", "dim"


def count(number: float) -> str:
    """Return a step or count: ``41,200``."""
    return f"{number:,.0f}"


def cut_words(told: Forecast) -> str:
    """Return at which step the time limit will end the run."""
    if told.cut_at is None or told.total is None:
        return ""
    return f"will be cut at step {count(told.cut_at)} of {count(told.total)}"


def forecast_words(told: Forecast, now: float) -> list[str]:
    """Return progress, pace and end, then what is wrong; where no step comes any more, no pace and no end."""
    step = f"step {count(told.step)}"
    if told.total is not None:
        step += f" of {count(told.total)} ({told.share or 0:.0%})"
    parts = [step]
    pace = ""
    if told.pace is not None:
        pace = f"{told.pace:.3g} steps/s" if told.pace >= 1 else f"{1 / told.pace:.3g} s a step"
    if told.stalled:
        before = f" (before: {pace})" if pace else ""
        return [step, f"no step for {duration(told.quiet_s)}, far longer than one takes{before}"]
    if pace:
        parts.append(pace)
    if told.done_at is not None:
        parts.append(f"done in {duration(told.done_at - now)}")
    lines = [" · ".join(parts)]
    if told.cut_at is not None:
        lines.append(f"{cut_words(told)}: the time limit comes first")
    return lines


def rank_words(cell: RankCell) -> str:
    """Return what is known of one rank, in a line."""
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
        parts.append(f"last spoke {duration(cell.silent)} ago")
    parts.append(f"log {events.amount(cell.size)}")
    if cell.odd:
        parts.append(safe(cell.odd))
    return " · ".join(parts)


def wrap_text(text: str, width: int, most: int) -> list[str]:
    """Return a text of parts as at most so many lines, broken between parts where that can be."""
    lines = [""]
    for part in text.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1] or len(lines) == most:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def rank_counts(page: Page) -> str:
    """Return how many ranks are in which state."""
    found = Counter(cell.state for cell in page.ranks)
    return " · ".join(f"{number:,} {state}" for state, number in found.items()) or "no ranks yet"


def rank_line(page: Page) -> tuple[str, str, str]:
    """Return what the line above the ranks has before and after the names of the columns, and its kind."""
    if page.first_failure is not None:
        return f"{safe(failure_words(page.first_failure, page.ranks))} · {rank_counts(page)}", "", "bad"
    return rank_counts(page), odd_words(page), "warn" if page.odd else "dim"


def failures_first(cells: Sequence[RankCell]) -> tuple[RankCell, ...]:
    """Return the rank that failed first, then the others that failed, then the rest, each by rank.

    Where no rank is known to have failed first, all stay in their order.
    """
    if not any(cell.failed_first for cell in cells):
        return tuple(cells)
    return tuple(sorted(cells, key=lambda cell: (not cell.failed_first, cell.state != "failed")))


def nothing_of(what: str, page: Page, *, over: bool) -> str:
    """Return what an empty pane says: why nothing is known, that there is nothing, or nothing yet."""
    if page.trouble:
        return f"no {what}: {safe(page.trouble)}"
    return f"no {what}" if over else f"no {what} yet"


def standing_out(page: Page) -> list[Piece]:
    """Return the first failure, or else the ranks that stand out, if there are any."""
    if page.first_failure is not None:
        return [(safe(failure_words(page.first_failure, page.ranks)), "bad")]
    return [(odd_words(page), "warn")] if page.odd else []


def odd_words(page: Page, most: int = 3) -> str:
    """Return which ranks stand out and why."""
    odd = page.odd
    told = [f"{cell.rank} {safe(cell.odd)}" for cell in odd[:most]]
    rest = f" and {len(odd) - most} more" if len(odd) > most else ""
    return f"stand out: {'; '.join(told)}{rest}" if odd else "no rank stands out"


def percent(value: float | None, *, of_one: bool = False) -> str:
    """Return a percentage, ``-`` where it is not known."""
    if value is None:
        return "-"
    return f"{value * (100 if of_one else 1):.0f}%"


def node_cells(cell: NodeCell) -> dict[str, Piece]:
    """Return the cells of a row of the node list by column."""
    stale = "dim" if cell.age > STALE_S else ""
    hot = "bad" if (cell.temperature or 0) >= 85 else stale
    disk = max((share for _, share in cell.disks), default=None)
    gpus = " ".join("-" if item.util is None else f"{item.util:.0f}" for item in cell.gpus)
    trouble = "; ".join(cell.alarms)
    if stale:
        trouble = "; ".join(filter(None, (trouble, f"last sample {duration(cell.age)} ago")))
    return {
        "node": (safe(cell.name), "bold"),
        "gpu": (percent(cell.gpu), _load(cell.gpu) or stale),
        "gpus": (gpus, stale),
        "memory": (percent(cell.gpu_memory, of_one=True), stale),
        "heat": ("-" if cell.temperature is None else f"{cell.temperature:.0f}°", hot),
        "cpu": (percent(cell.cpu), stale),
        "ram": (percent(cell.memory, of_one=True), "bad" if (cell.memory or 0) > 0.95 else stale),
        "rx": ("-" if cell.receives is None else events.amount(cell.receives), stale),
        "tx": ("-" if cell.sends is None else events.amount(cell.sends), stale),
        "disk": (percent(disk, of_one=True), "bad" if (disk or 0) > 0.95 else stale),
        "about": (trouble, "bad" if trouble else ""),
    }


def _load(use: float | None) -> str:
    return "" if use is None else "good" if use >= 60 else "warn" if use >= 20 else "bad"


def header(row: JobRow, page: Page | None, now: float) -> list[Piece]:
    """Return the two lines above a job's page."""
    state, kind = state_piece(row)
    job = f"{safe(row.name)}  {safe(row.job_id)} on {safe(row.cluster)}"
    attempt = page.attempt if page is not None else row.attempt
    nodes = f" · {pluralize(row.ranks, 'rank')} on {safe(row.nodelist) or size_words(row)}"
    span = elapsed(row, now)
    second = f"attempt {attempt} · " + (f"parent run {safe(row.parent)} · " if row.parent else "")
    if page is not None and attempt < max(page.attempts, default=attempt):
        second += f"ended, attempt {max(page.attempts)} is the newest"
    elif span is None:
        second += "ended · " if page is not None and page.attempts else ""
        second += f"{about_words(row, now)[0] or 'not started'}"
    else:
        limit = f" of {duration(row.limit)}" if row.limit and not row.requeued else ""
        second += f"{duration(span)}{limit}"
        if (row.over or row.pending) and row.about:
            second += f" · {safe(row.about)}"
    return [(f"{state}  {job}{nodes}", kind), (second, "dim")]


def timeline(page: Page, now: float) -> list[Piece]:
    """Return all events, newest last."""
    told = [
        (
            f"{at(one.time, now) if one.time is not None else '--:--':>5}  {safe(one.text)}",
            "bad" if one.bad else "",
        )
        for one in events.lines(page.events)
    ]
    return told or [("no events yet", "dim")]


METRICS = (
    ("loss", "loss"), ("tokens_per_s", "tokens/s"), ("tflops_per_gpu", "TFLOP/s per GPU"),
    ("step_time_s", "s a step"), ("grad_norm", "gradient norm"), ("learning_rate", "learning rate"),
)  # fmt: skip
RATES = {"tokens_per_s", "tflops_per_gpu", "step_time_s"}


def short(value: float, digits: int = 3) -> str:
    """Return a number in a few characters: ``0.213``, ``407.4k``, ``3e-04``."""
    unit = ""
    if 1e4 <= abs(value) < 1e15:
        power = min(4, int(math.log10(abs(value) * 1.0001)) // 3)
        unit, value = "kMGT"[power - 1], value / 1000**power
    plain = 100 <= abs(value) < 1e4  # four digits rather than an exponent
    return f"{value:.{max(4, digits) if plain else digits}g}{unit}"


Attempts = Mapping[int, Sequence[TrainPoint]]


def joined_attempts(page: Page, earlier: Attempts) -> Attempts:
    """Return what all attempts up to the page's said of their training, oldest first."""
    return {
        **{number: earlier[number] for number in sorted(earlier) if number < page.attempt},
        page.attempt: page.points,
    }


def restarts(page: Page, earlier: Attempts) -> list[float]:
    """Return the steps at which attempts began whose curves follow on an earlier one's."""
    return [float(step) for step in restart_steps(joined_attempts(page, earlier)).values()]


def curves(
    page: Page, most: int, earlier: Attempts | None = None
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the curves to draw with their titles: the loss, a throughput, then what else there is.

    Args:
        earlier: attempts before the page's, whose curves are joined with its own.
    """
    found = []
    attempts = joined_attempts(page, earlier or {})
    before = ", before it stalled" if page.forecast is not None and page.forecast.stalled else ""
    for key, title in METRICS:
        points = page.series(key)
        if len(attempts) > 1:
            points = [(float(step), value) for step, value in join_attempts(attempts.values(), key)]
        if points:
            last = points[-1][1]
            found.append((f"{title} {short(last, 4)}{before if key in RATES else ''}", points))
    if len(found) < 2 and (pace := paces(page.points)):
        found.append((f"steps/s {short(pace[-1][1])}{before}", pace))
    return found[:most]


def paces(points: Sequence[TrainPoint]) -> list[tuple[float, float]]:
    """Return (step, steps a second) where nobody told a throughput."""
    known = [
        (float(point.time), float(point.step))
        for point in points
        if point.time is not None and point.step is not None and drawable(point.time)
    ]
    known = moments(known)
    if len(known) < FEWEST_MOMENTS:
        return []
    chosen = known[:: max(1, len(known) // 200)]
    return [
        (step, (step - before) / (moment - then))
        for (then, before), (moment, step) in pairwise(chosen)
        if moment > then and step >= before
    ]
