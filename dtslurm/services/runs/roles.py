"""The roles of a run: their names, and the number of their instances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.roles import MAX_INSTANCES
from dtslurm.services.runs.status import views
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name


def role_names(record: JobRecord) -> tuple[str, list[str]]:
    """Return the name of a run's main role, and those of its other roles; empty for a run of one role."""
    try:
        spec = RunDir(Path(record.folder)).document().get("spec")
    except StoreError:
        return "", []
    roles = spec.get("roles") if isinstance(spec, dict) else None
    if not isinstance(roles, dict):
        return "", []
    others = [role.get("name") for role in roles.get("others") or [] if isinstance(role, dict)]
    return str(roles.get("main")), [name for name in others if isinstance(name, str)]


def scale_roles(context: Context, record: JobRecord, counts: Mapping[str, int]) -> None:
    """Request other numbers of instances in a live run; its supervisor changes them within seconds.

    Raises:
        RequestInvalid: a role does not exist, a number is out of range, or the run has ended.
        TransportError: the request could not be written.
    """
    main, names = role_names(record)
    problems = []
    for name, count in counts.items():
        if name == main:
            problems.append(f"{name}: the number of ranks of the main role is fixed")
        elif name not in names:
            suggestion = suggest_name(name, names) or (f" (roles: {', '.join(names)})" if names else "")
            problems.append(f"{name}: the run has no such role{suggestion}")
        elif not 0 <= count <= MAX_INSTANCES:
            problems.append(f"{name}: the number of instances must be from 0 to {MAX_INSTANCES}, not {count}")
    if record.array is not None:
        problems.append("the roles of array tasks cannot be scaled")
    view = views(context, [record])[0]
    if view.terminal:
        problems.append(f"job {record.job_id or record.name} has ended ({view.statuses[0].word})")
    if problems:
        raise RequestInvalid(problems)
    transport = context.cluster_of(record).transport
    for name, count in counts.items():
        transport.put(json.dumps({"instances": count}).encode(), f"{record.run_dir}/scale-{name}.json")
