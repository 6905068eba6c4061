"""``dtslurm usage``."""

from __future__ import annotations

from dataclasses import asdict, fields

import click

from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output
from dtslurm.model.runs.usage import UsageRow
from dtslurm.services.observe.usage import GROUPS, rows, total
from dtslurm.services.observe.usage import usage as find_usage
from dtslurm.services.wiring.context import Context


@click.command()
@click.option("--since", default="30d", metavar="TIME", help="12h, 30d, 8w or 2026-01-31. [default: 30d]")
@click.option("--by", type=click.Choice(GROUPS), default="account", help="Group the rows. [default: account]")
@click.option("--cluster", metavar="NAME", help="Show only this cluster.")
@click.option(
    "-a", "--all-users", is_flag=True, help="Include the jobs of all users that the cluster shows you."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values on stdout.")
@json_option
def usage(since: str, by: str, cluster: str | None, all_users: bool, as_csv: bool, as_json: bool) -> None:
    """Show GPU-hours requested, allocated, used and idle."""
    usage_data = find_usage(Context(), cluster=cluster, period_start=since, everybody=all_users)
    group_rows, total_row = rows(usage_data, by), total("all", usage_data.held, usage_data)
    for trouble in usage_data.trouble:
        output.note(trouble)
    if as_json:
        output.document(
            since=usage_data.since,
            until=usage_data.until,
            by=by,
            rows=group_rows,
            total=total_row,
            trouble=usage_data.trouble,
        )
        return
    if as_csv:
        titles = [by, *(item.name for item in fields(UsageRow) if item.name != "group")]
        output.comma_separated([titles, *(list(asdict(row).values()) for row in group_rows)])
        return
    if not usage_data.held:
        output.note(f"accounting has no jobs in the requested time (--since {since})")
        return
    output.say(describe_idle_time(total_row))
    table_rows = [*group_rows, total_row] if len(group_rows) > 1 else group_rows
    titles = [by.upper(), "JOBS", "IDLE", "USED", "ALLOCATED", "REQUESTED", "CPU ALLOCATED"]
    table_cells = [_format_cells(row) for row in table_rows]
    for title, values in (
        ("GPU KWH", [row.gpu_kwh for row in table_rows]),
        (f"PRICE {total_row.currency}".rstrip(), [row.price for row in table_rows]),
    ):
        if any(value is not None for value in values):
            titles.append(title)
            for cells, value in zip(table_cells, values, strict=True):
                cells.append("-" if value is None else f"{value:,.1f}")
    output.table(tuple(titles), table_cells)


def describe_idle_time(total_row: UsageRow) -> str:
    """Return a sentence about the GPU time that was idle."""
    if not total_row.gpu_hours_held:
        return f"no GPU-hours; {total_row.cpu_hours_held:,.1f} CPU-hours allocated"
    if not total_row.gpu_hours_known:
        return f"{total_row.gpu_hours_held:,.1f} GPU-hours allocated; no samples show how many were idle"
    share = total_row.gpu_hours_idle / total_row.gpu_hours_known
    unknown_hours = total_row.gpu_hours_held - total_row.gpu_hours_known
    unknown_text = f"; no samples of {unknown_hours:,.1f} more" if unknown_hours > 0.05 else ""
    idle_text = f"{total_row.gpu_hours_idle:,.1f} of {total_row.gpu_hours_known:,.1f} GPU-hours"
    price = ""
    if total_row.price_idle is not None:
        price = f", for {total_row.price_idle:,.2f} of {total_row.price:,.2f} {total_row.currency}".rstrip()
    return f"{idle_text} were idle ({share:.0%}){price}{unknown_text}"


def _format_cells(row: UsageRow) -> list[str]:
    has_samples = row.gpu_hours_known > 0
    return [
        row.group,
        str(row.jobs),
        f"{row.gpu_hours_idle:,.1f} h" if has_samples else "?" if row.gpu_hours_held else "-",
        f"{row.gpu_hours_used:,.1f} h" if has_samples else "?" if row.gpu_hours_held else "-",
        f"{row.gpu_hours_held:,.1f} h",
        f"{row.gpu_hours_asked:,.1f} h",
        f"{row.cpu_hours_held:,.1f} h",
    ]
