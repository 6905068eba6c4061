"""What a script says of data on local disks: brought before training, brought back after it."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import Sh, join, quote
from dtslurm.render.directives import Directives
from dtslurm.render.text import wrap
from dtslurm.worker.staging.request import Item, parse

_WIDTH = 100


def items(spec: JobSpec) -> tuple[Item, ...]:
    """Return what is brought to the nodes."""
    return tuple(parse(text) for text in spec.stage_in)


def staged_mounts(spec: JobSpec) -> tuple[str, ...]:
    """Return what containers need to see of it: all but what each node names for itself."""
    found = (*(item.to for item in items(spec)), *(text.partition(":")[0] for text in spec.stage_out))
    return tuple(dict.fromkeys(f"{path}:{path}" for path in found if "$" not in path))


def staging_values(
    spec: JobSpec, layout: TaskLayout, directives: Directives, directory: str, *, program: bool, shrinks: bool
) -> dict[str, object] | None:
    """Return what the templates need, None where nothing is staged.

    Args:
        program: the run directory holds the program; otherwise the script copies by plain shell.
        shrinks: an attempt may have fewer nodes than the job.
    """
    if not (spec.stage_in or spec.stage_out or spec.artifacts):
        return None
    count = '"$nodes"' if shrinks else layout.nodes
    srun: list[object] = ["srun", Sh(f"--nodes={count}"), Sh(f"--ntasks={count}"), "--ntasks-per-node=1"]
    if "cpus-per-task" in directives:
        srun.append(Sh('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    if spec.supervised:
        srun += [Sh('--nodelist="$SLURM_JOB_NODELIST"'), "--overlap"]
    srun += ["--kill-on-bad-exit=0", "--wait=0"]
    start = ("python3", "-BES", f"{directory}/staging")
    out = tuple(f"--from={text}" for text in spec.stage_out)
    stage = (f"--ranks-per-node={layout.ranks_per_node}", *(f"--stage={text}" for text in spec.stage_in))
    found = items(spec)
    return {
        "program": program,
        "in": Sh(_lines((*start, "in"), stage, ("--", *srun))) if spec.stage_in else None,
        "out": Sh(_lines((*start, "out"), out, ("--", *srun))) if spec.stage_out else None,
        "watch": Sh(join((*start, "watch", Sh('"$$"'), spec.signal, *out))),
        "signal": Sh(spec.signal),
        "artifacts": Sh(join((*start, "artifacts", *spec.artifacts))) if spec.artifacts else None,
        "plain_in": Sh(wrap((*srun, "bash", Sh('"$DTSLURM_RUN_DIR/stage.sh"')))),
        "plain_out": Sh(wrap((*srun, "bash", Sh('"$DTSLURM_RUN_DIR/results.sh"')))),
        "items": [{"name": Sh(one.variable), "to": Sh(f'"{one.to}"'), "source": one.source} for one in found],
        "back": [_back(text) for text in spec.stage_out],
    }


def _back(text: str) -> dict[str, object]:
    item = parse(text, out=True)
    to = Sh(f'"$DTSLURM_RUN_DIR"/{quote(item.to)}') if not item.to.startswith("/") else item.to
    return {"source": Sh(f'"{item.source}"'), "to": to}


def _lines(head: Sequence[object], middle: Sequence[object], tail: Sequence[object]) -> str:
    """Return a command, one line for each thing that is staged."""
    lines = [join(head), *(quote(word) for word in middle), quote(tail[0])]
    for word in map(quote, tail[1:]):
        if len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n  ".join(lines)
