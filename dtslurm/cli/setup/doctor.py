"""``dtslurm doctor``."""

from __future__ import annotations

import click

from dtslurm.cli.options import json_option, transport_option
from dtslurm.cli.printing import output
from dtslurm.services.clusters.doctor import examine
from dtslurm.services.wiring.context import Context


@click.command()
@click.option("--cluster", metavar="NAME", help="Check this cluster. [default: as for submit]")
@transport_option
@json_option
def doctor(cluster: str | None, transport: str | None, as_json: bool) -> None:
    """Check this machine and the cluster in use. Exits with 1 if a requirement is missing."""
    findings = examine(Context(), cluster, transport)
    failed = any(finding.ok is False for finding in findings)
    if as_json:
        output.document(ok=not failed, findings=findings)
    else:
        marks = {True: "ok", False: "FAIL", None: "-"}
        rows = [
            [marks[finding.ok], finding.what, finding.found + (f"; {finding.hint}" if finding.hint else "")]
            for finding in findings
        ]
        output.table(("", "WHAT", "FOUND"), rows, {"FAIL": "bold red", "ok": "green"})
    if failed:
        raise click.exceptions.Exit(1)
