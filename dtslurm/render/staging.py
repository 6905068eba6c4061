"""The parts of a script that stage data: to local disks before training, and results back afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.shell import RawShell, join, quote
from dtslurm.render.directives import Directives
from dtslurm.render.text import wrap
from dtslurm.worker.staging.request import Item, parse

_WIDTH = 100


def items(spec: JobSpec) -> tuple[Item, ...]:
    """Return the parsed ``--stage-in`` options: what is copied to the nodes, and where to."""
    return tuple(parse(option) for option in spec.stage_in)


def staged_mounts(spec: JobSpec) -> tuple[str, ...]:
    """Return the container mounts of staged paths, except paths that each node determines itself (``$``)."""
    paths = (*(item.to for item in items(spec)), *(option.partition(":")[0] for option in spec.stage_out))
    return tuple(dict.fromkeys(f"{path}:{path}" for path in paths if "$" not in path))


def staging_values(
    spec: JobSpec, layout: TaskLayout, directives: Directives, directory: str, *, program: bool, shrinks: bool
) -> dict[str, object] | None:
    """Return the values for the staging templates, None if nothing is staged.

    Args:
        program: whether the run directory contains the staging program; otherwise the script copies with
            shell commands.
        shrinks: whether an attempt may have fewer nodes than the job.
    """
    if not (spec.stage_in or spec.stage_out or spec.artifacts):
        return None
    node_count = '"$nodes"' if shrinks else layout.nodes
    srun: list[object] = [
        "srun",
        RawShell(f"--nodes={node_count}"),
        RawShell(f"--ntasks={node_count}"),
        "--ntasks-per-node=1",
    ]
    if "cpus-per-task" in directives:
        srun.append(RawShell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    if spec.supervised:
        srun += [RawShell('--nodelist="$SLURM_JOB_NODELIST"'), "--overlap"]
    srun += ["--kill-on-bad-exit=0", "--wait=0"]
    program_words = ("python3", "-BES", f"{directory}/staging")
    from_words = tuple(f"--from={option}" for option in spec.stage_out)
    stage_words = (
        f"--ranks-per-node={layout.ranks_per_node}",
        *(f"--stage={option}" for option in spec.stage_in),
    )
    staged_items = items(spec)
    return {
        "program": program,
        "in": RawShell(_format_command((*program_words, "in"), stage_words, ("--", *srun)))
        if spec.stage_in
        else None,
        "out": RawShell(_format_command((*program_words, "out"), from_words, ("--", *srun)))
        if spec.stage_out
        else None,
        "watch": RawShell(join((*program_words, "watch", RawShell('"$$"'), spec.signal, *from_words))),
        "signal": RawShell(spec.signal),
        "artifacts": RawShell(join((*program_words, "artifacts", *spec.artifacts)))
        if spec.artifacts
        else None,
        "plain_in": RawShell(wrap((*srun, "bash", RawShell('"$DTSLURM_RUN_DIR/stage.sh"')))),
        "plain_out": RawShell(wrap((*srun, "bash", RawShell('"$DTSLURM_RUN_DIR/results.sh"')))),
        "items": [
            {"name": RawShell(item.variable), "to": RawShell(f'"{item.to}"'), "source": item.source}
            for item in staged_items
        ],
        "back": [_stage_out_item(option) for option in spec.stage_out],
    }


def _stage_out_item(text: str) -> dict[str, object]:
    item = parse(text, is_stage_out=True)
    to = RawShell(f'"$DTSLURM_RUN_DIR"/{quote(item.to)}') if not item.to.startswith("/") else item.to
    return {"source": RawShell(f'"{item.source}"'), "to": to}


def _format_command(
    first_words: Sequence[object], item_words: Sequence[object], last_words: Sequence[object]
) -> str:
    """Return a shell command with one line per staged item."""
    lines = [join(first_words), *(quote(word) for word in item_words), quote(last_words[0])]
    for word in map(quote, last_words[1:]):
        if len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n  ".join(lines)
