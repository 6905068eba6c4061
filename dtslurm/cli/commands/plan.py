"""``dtslurm plan``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.model.paths import working_directory

if TYPE_CHECKING:
    from dtslurm.services.planning.plan import Plan


@click.command()
@click.argument("model", required=False)
@click.option("--model-config", metavar="FILE", help="Read a Hugging Face config.json instead of MODEL.")
@click.option(
    "--cluster", metavar="NAME", help="Plan for this cluster's nodes. [default: see dtslurm doctor]"
)
@click.option("--node-type", metavar="NAME", help="Select one of the profile's node types.")
@click.option(
    "--gpu", metavar="NAME", help="Plan for nodes with this GPU, such as H100-80GB, without a profile."
)
@click.option("-N", "--nodes", type=int, metavar="N", help="Set the number of nodes. [default: 1]")
@click.option(
    "--gpus-per-node", type=int, metavar="N", help="Set GPUs per node. [default: the profile's or --gpu's]"
)
@click.option(
    "-s", "--seq-len", type=int, metavar="TOKENS", help="Set the length. [default: the model's, at most 4096]"
)
@click.option("--gbs", type=int, metavar="N", help="Set the global batch size, in sequences per step.")
@click.option("--framework", metavar="NAME", help="Use megatron, nemo, torchtitan, fsdp or deepspeed.")
@click.option(
    "--precision", metavar="NAME", default="bf16", help="Use bf16, fp16, fp8 or fp32. [default: bf16]"
)
@click.option("--layout", metavar="tp=8,pp=2,…", help="Estimate only this layout.")
@click.option("--tokens", type=float, metavar="N", help="Estimate also time, GPU-hours and cost of N tokens.")
@click.option("--price", metavar="AMOUNT", help="Set the GPU-hour price, currency optional: 2.5EUR.")
@click.option("--watts", type=float, metavar="W", help="Set the power of a GPU and its share of the node.")
@click.option("--scaling", is_flag=True, help="Show also the best layout at 1, 2, 4, … nodes.")
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1, 100),
    default=5,
    help="Show N layouts. [default: 5]",
)
@click.option(
    "--emit",
    metavar="FORM",
    help="Print the best layout for torchrun, deepspeed, megatron, torchtitan or accelerate, or as job: a "
    "file for dtslurm submit. torchtitan means the installed version; torchtitan-0.2 is its TOML.",
)
@click.option("--plot", metavar="FILE.svg", help="Draw memory, the step and the scaling curve.")
@click.option("--calibrate", metavar="JOB", help="Calibrate with this run's measurements of --layout.")
@click.option("--evaluate", metavar="ROWS.csv", help="Predict measured runs and show the errors.")
@json_option
def plan(
    as_json: bool,
    evaluate: str | None,
    calibrate: str | None,
    emit: str | None,
    plot: str | None,
    **asked: Any,
) -> None:
    """Show each layout of MODEL that fits a cluster: memory, time and reasons."""
    if evaluate is not None:
        _show_evaluation(Path(evaluate), as_json)
        return
    from dtslurm.cli.printing import plan_text
    from dtslurm.services.planning.plan import PlanRequest, make

    if emit is not None:
        from dtslurm.services.planning.plan_output import check_form, form_for_installed

        check_form(emit)
        emit = form_for_installed(emit, os.environ)
        if as_json:
            raise RequestInvalid(
                ["--emit prints a configuration, and --json prints the plan; give only one of them"]
            )
    asked["price"], asked["currency"] = _parse_price(asked["price"])
    if calibrate is not None and not asked["layout"]:
        raise RequestInvalid(["--calibrate needs the --layout of the run"])
    asked["scaling"] = asked["scaling"] or plot is not None  # the plot shows the scaling curve
    new_plan = make(PlanRequest(**asked, emit=emit), working_directory())
    if calibrate is not None:
        _show_calibration(new_plan, calibrate, as_json)
        return
    if plot is not None:
        from dtslurm.services.planning.plan_output import draw

        draw(new_plan, Path(plot))
    if emit is not None:
        from dtslurm.services.planning.plan_output import emitted

        click.echo(emitted(new_plan, emit), nl=False)
    elif as_json:
        output.document(**plan_text.values(new_plan))
    else:
        plan_text.show(new_plan)
    if not new_plan.chosen or not new_plan.chosen[0].fits:
        raise click.exceptions.Exit(2)


def _parse_price(text: str | None) -> tuple[float | None, str]:
    """Return an amount and its currency, which may precede or follow the amount.

    Raises:
        RequestInvalid: the text contains no amount.
    """
    if text is None:
        return None, ""
    match = re.fullmatch(
        r"\s*(\D{0,12}?)\s*(-?[\d.]+(?:e-?\d+)?)\s*(\D{0,12}?)\s*", text, re.ASCII | re.IGNORECASE
    )
    before, amount, after = match.groups() if match else ("", "", "")
    try:
        return float(amount), before or after
    except ValueError:
        raise RequestInvalid(
            [f"--price {text!r} should be a number, as 2.5, or one with its currency, as 2.5EUR"]
        ) from None


def _show_evaluation(path: Path, as_json: bool) -> None:
    from dtslurm.cli.printing import plan_rows
    from dtslurm.services.planning.evaluate import evaluate_file

    answers = evaluate_file(path)
    if as_json:
        output.document(**plan_rows.values(answers))
    else:
        plan_rows.show(answers)


def _show_calibration(made: Plan, job: str, as_json: bool) -> None:
    from dtslurm.services.planning.calibrate import calibrate, capped

    path, measurement = calibrate(made, job, working_directory())
    if as_json:
        output.document(file=str(path), measurement=measurement)
        return
    step, memory = measurement.measured_step_s, measurement.measured_memory_gib
    if step is not None:
        output.say(f"step: {step:.3g} s measured, {measurement.predicted_step_s:.3g} s predicted")
    if memory is not None:
        output.say(f"memory: {memory:.1f} GiB measured, {measurement.predicted_memory_gib:.1f} GiB predicted")
    for quantity, ratio, applied in capped(measurement):
        output.note(
            f"{quantity}: the factor {ratio:.3g} is too large or too small for a run of this plan; "
            f"{applied:g} is used"
        )
    output.note(f"saved in {path}; the next plan on this cluster uses it")
