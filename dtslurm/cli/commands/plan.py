"""``dtslurm plan``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtslurm.cli import completers
from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.model.paths import working_directory

if TYPE_CHECKING:
    from dtslurm.services.planning.plan import Plan
    from dtslurm.services.submit.probe import ProbedLayout


class PlanCommand(click.Command):
    """A command whose words after ``--`` are arguments of the probed script, never a MODEL."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before ``--``, and keep the rest."""
        own_count = args.index("--") if "--" in args else len(args)
        remaining_args = super().parse_args(ctx, args[:own_count])
        ctx.params["script_args"] = tuple(args[own_count + 1 :])
        return remaining_args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage with the script's arguments."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


@click.command(cls=PlanCommand)
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
@click.option(
    "--calibrate",
    metavar="JOB",
    shell_complete=completers.complete_jobs,
    help="Calibrate with this run's measurements of --layout, or with a probe.",
)
@click.option(
    "--probe",
    metavar="SCRIPT|JOB.yaml",
    type=click.Path(),
    help="Run a few steps of each layout shown, calibrate, and plan again. SCRIPT gets ARGS.",
)
@click.option("-y", "--yes", is_flag=True, help="Queue the jobs of --probe without confirmation.")
@click.option("--evaluate", metavar="ROWS.csv", help="Predict measured runs and show the errors.")
@json_option
def plan(
    script_args: tuple[str, ...],
    as_json: bool,
    evaluate: str | None,
    calibrate: str | None,
    probe: str | None,
    yes: bool,
    emit: str | None,
    plot: str | None,
    **options: Any,
) -> None:
    """Show each layout of MODEL that fits a cluster: memory, time and reasons."""
    _refuse_combinations({"--evaluate": evaluate, "--calibrate": calibrate, "--probe": probe}, script_args)
    if evaluate is not None:
        _show_evaluation(Path(evaluate), as_json)
        return
    from dtslurm.services.planning.plan import PlanRequest, make

    emit = _find_form(emit, as_json=as_json)
    options["price"], options["currency"] = _parse_price(options["price"])
    options["scaling"] = options["scaling"] or plot is not None  # the plot shows the scaling curve
    request = PlanRequest(**options, emit=emit)
    results: Sequence[ProbedLayout] = ()
    if probe is not None:
        from dtslurm.cli.plan_probe import run_probe

        new_plan, results = run_probe(make(request, working_directory()), probe, script_args, yes=yes)
    elif calibrate is not None:
        from dtslurm.cli.plan_probe import wait_for_probe

        probed = wait_for_probe(request, calibrate)
        if probed is None:
            if not request.layout:
                raise RequestInvalid(["--calibrate needs the --layout of the run"])
            _show_calibration(make(request, working_directory()), calibrate, as_json)
            return
        new_plan, results = probed
    else:
        new_plan = make(request, working_directory())
    _show(new_plan, results, plot, as_json=as_json)


def _find_form(emit: str | None, *, as_json: bool) -> str | None:
    """Return the configuration format to print, for the installed version of its framework."""
    if emit is None:
        return None
    from dtslurm.services.planning.plan_output import check_form, form_for_installed

    check_form(emit)
    if as_json:
        raise RequestInvalid(
            ["--emit prints a configuration, and --json prints the plan; give only one of them"]
        )
    return form_for_installed(emit, os.environ)


def _show(new_plan: Plan, results: Sequence[ProbedLayout], plot: str | None, *, as_json: bool) -> None:
    """Print a plan, or the configuration of its best layout.

    Raises:
        Exit: no layout fits.
    """
    from dtslurm.cli.printing import plan_text

    emit = new_plan.request.emit
    if plot is not None:
        from dtslurm.services.planning.plan_output import draw

        draw(new_plan, Path(plot))
    if emit is not None:
        from dtslurm.services.planning.plan_output import emitted

        click.echo(emitted(new_plan, emit), nl=False)
    elif as_json:
        output.document(**plan_text.values(new_plan), **({"probe": results} if results else {}))
    else:
        plan_text.show(new_plan)
    if not new_plan.chosen or not new_plan.chosen[0].fits:
        raise click.exceptions.Exit(2)


def _refuse_combinations(actions: Mapping[str, str | None], script_args: tuple[str, ...]) -> None:
    given_options = [name for name, value in actions.items() if value is not None]
    if len(given_options) > 1:
        raise RequestInvalid([f"give only one of {' and '.join(given_options)}"])
    if script_args and "--probe" not in given_options:
        raise RequestInvalid(
            [f"arguments after -- are for a script, and there is no --probe: {script_args[0]}"],
            hint="name the script, as in --probe train.py -- --tp '${tp}'",
        )


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
    prefix, amount, suffix = match.groups() if match else ("", "", "")
    try:
        return float(amount), prefix or suffix
    except ValueError:
        raise RequestInvalid(
            [f"--price {text!r} should be a number, as 2.5, or one with its currency, as 2.5EUR"]
        ) from None


def _show_evaluation(path: Path, as_json: bool) -> None:
    from dtslurm.cli.printing import plan_rows
    from dtslurm.services.planning.evaluate import evaluate_file

    predictions = evaluate_file(path)
    if as_json:
        output.document(**plan_rows.values(predictions))
    else:
        plan_rows.show(predictions)


def _show_calibration(uncalibrated_plan: Plan, job: str, as_json: bool) -> None:
    from dtslurm.services.planning.calibrate import calibrate, capped

    path, measurement = calibrate(uncalibrated_plan, job, working_directory())
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
