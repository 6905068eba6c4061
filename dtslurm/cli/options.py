"""Options shared by several commands. Names and letters are sbatch's where sbatch has the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from dtslurm.cli import completers
from dtslurm.errors import RequestInvalid

_Command = TypeVar("_Command", bound=Callable[..., Any])

transport_option = click.option(
    "--transport",
    type=click.Choice(["local", "openssh", "paramiko"]),
    help="Set how dtslurm reaches the cluster.",
)

_node_type_option = click.option(
    "--node-type", metavar="NAME", help="Select one of the profile's node types."
)
_sbatch_option = click.option(
    "--sbatch",
    multiple=True,
    metavar="--OPTION",
    help="Pass an option to sbatch. sbatch's own names work too: --exclusive, --comment TEXT.",
)

_RESOURCE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--cluster",
        metavar="NAME",
        shell_complete=completers.complete_clusters,
        help="Use this profile. [default: see dtslurm doctor]",
    ),
    click.option("-N", "--nodes", type=int, metavar="N", help="Set the number of nodes. [default: 1]"),
    click.option(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="Set GPUs per node. [default: all if --node-type or the profile names the node type, else none]",
    ),
    click.option(
        "--ntasks-per-node",
        type=int,
        metavar="N",
        help="Set ranks per node, for every launcher. [default: one per GPU, else 1]",
    ),
    click.option("-c", "--cpus-per-task", type=int, metavar="N", help="Set CPUs per rank."),
    click.option("--mem", metavar="SIZE", help="Set memory per node, such as 480G."),
    click.option(
        "-t", "--time", metavar="TIME", help="Set the time limit: minutes, HH:MM:SS, D-HH:MM:SS or 2h30m."
    ),
    click.option("-p", "--partition", metavar="NAME"),
    click.option("-A", "--account", metavar="NAME"),
    click.option("-q", "--qos", metavar="NAME"),
    click.option("-C", "--constraint", metavar="FEATURES"),
    click.option("-x", "--exclude", metavar="NODES"),
    click.option("-w", "--nodelist", metavar="NODES"),
    click.option("--reservation", metavar="NAME"),
)
_JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    *_RESOURCE_OPTIONS,
    click.option("-J", "--job-name", metavar="NAME", help="Name the job. [default: the script's name]"),
    click.option("-a", "--array", metavar="INDICES", help="Submit a job array, such as 0-9 or 0-99%10."),
    click.option(
        "-o",
        "--output",
        metavar="PATTERN",
        help="Write the batch script's output also to a file: logs/%x-%j.out.",
    ),
    click.option("-e", "--error", metavar="PATTERN", help="Write the batch script's stderr also to a file."),
    click.option("-d", "--dependency", metavar="EXPR", help="Set a dependency, such as afterok:1234."),
    _node_type_option,
    click.option(
        "-l",
        "--launcher",
        metavar="NAME",
        help="Set the launcher; auto detects it from the script. [default: torchrun, or single for one rank]",
    ),
    click.option(
        "--launcher-option",
        "launcher_options",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set a launcher option. Options that dtslurm does not read go to the launcher.",
    ),
    click.option("--container", metavar="IMAGE", help="Run every rank in this image: a file or a reference."),
    click.option("--container-mount", "container_mounts", multiple=True, metavar="SRC[:DST[:ro]]"),
    click.option(
        "--env", multiple=True, metavar="NAME[=VALUE]", help="Set a job variable; NAME alone copies yours."
    ),
    click.option("--setup", multiple=True, metavar="CMD", help="Run this shell line before training."),
    click.option(
        "--teardown",
        multiple=True,
        metavar="CMD",
        help="Run this shell line when the job ends, failed or not.",
    ),
    click.option(
        "--signal", metavar="NAME", help="Set the early signal, also as sbatch's B:USR1@300. [default: USR2]"
    ),
    click.option(
        "--signal-before",
        type=int,
        metavar="SECONDS",
        help="Send the early signal this many seconds before the time limit.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        help="Restart after transient failures: crashes, hangs and node faults, N times each. "
        "[default: never]",
    ),
    click.option(
        "--spare-nodes",
        type=click.IntRange(min=0),
        metavar="K",
        help="Request K spare nodes that replace lost nodes within the job.",
    ),
    click.option(
        "--hang-timeout",
        metavar="TIME",
        help="Restart if no rank writes output or is active for this long; auto learns the time.",
    ),
    click.option(
        "--total-time",
        metavar="TIME",
        help="Requeue at time limits until training has run this long in total, such as 7-00:00:00.",
    ),
    click.option(
        "--requeue/--no-requeue",
        default=None,
        help="Let Slurm requeue the job, as after a node failure. [default: if the run can continue]",
    ),
    click.option(
        "--fabric-check/--no-fabric-check",
        default=None,
        help="Measure the network between all ranks before training; exit with 86 if it is bad.",
    ),
    click.option(
        "--health-check/--no-health-check",
        default=None,
        help="Check every node before training and exclude bad nodes. [default: with restarts]",
    ),
    click.option(
        "--node-memory/--no-node-memory",
        default=None,
        help="Exclude nodes on the bad-node list (dtslurm cluster nodes). [default: node-memory]",
    ),
    click.option(
        "--sample/--no-sample",
        default=None,
        help="Sample each node's GPUs, network, CPU and memory during the run. [default: sample]",
    ),
    click.option(
        "--stage",
        "stage_in",
        multiple=True,
        metavar="SRC[:DST[:OPTION,...]]",
        help="Copy SRC to each node's local disk before training; options: shards=, method=, name=.",
    ),
    click.option(
        "--stage-out",
        multiple=True,
        metavar="SRC[:DST]",
        help="Copy SRC back from local disks on the early signal and at the end of the job.",
    ),
    click.option(
        "--artifact",
        "artifacts",
        multiple=True,
        metavar="PATTERN",
        help="Register these files of the run directory as results.",
    ),
    _sbatch_option,
    click.option("--template", metavar="FILE", help="Use your own base template."),
    click.option(
        "--python", metavar="FILE", help="Set the interpreter. [default: the active environment's, or uv's]"
    ),
    click.option("-D", "--chdir", metavar="DIR", help="Run in this cluster folder as it is at run time."),
    click.option(
        "--snapshot/--no-snapshot",
        default=None,
        help="Run from a snapshot of the code as it is now, not in this folder. [default: over SSH]",
    ),
    click.option(
        "--code-include",
        multiple=True,
        metavar="PATTERN",
        help="Copy these files too; patterns as in .gitignore.",
    ),
    click.option("--code-exclude", multiple=True, metavar="PATTERN", help="Do not copy these files."),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME",
        help="Pass this variable to the job in a file that only you can read, never in the script.",
    ),
    click.option(
        "--tracker",
        multiple=True,
        metavar="NAME",
        help="Set the variables of wandb, mlflow, tensorboard or aim that describe the run.",
    ),
    click.option(
        "--tracking",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set the trackers' project, group, tags, uri or mode.",
    ),
    click.option(
        "--notify",
        multiple=True,
        metavar="NAME|URL",
        help="Send messages about the run to this secret's or Apprise URL: Slack, mail, ntfy, webhooks.",
    ),
    transport_option,
    click.option(
        "--once",
        metavar="KEY",
        help="Queue at most one job per idempotency key; later submissions return the first job's id.",
    ),
    click.option("--no-check", is_flag=True, default=None, help="Queue without querying the cluster first."),
    click.option("--run-root", metavar="DIR", help="Store all runs in DIR. [default: the profile's]"),
    click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, as python -m does."),
)


# The sections in the help of submit and render; options in no section come last.
SECTIONS = {
    "Slurm options": (
        "cluster", "job_name", "nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "mem", "time",
        "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "array",
        "dependency", "output", "error", "node_type", "allocation", "sbatch",
    ),
    "Launcher and environment": (
        "launcher", "launcher_options", "container", "container_mounts", "env", "secrets", "setup",
        "teardown", "python", "module", "template",
    ),
    "Code and folders": ("chdir", "snapshot", "code_include", "code_exclude", "run_root"),
    "Restarts, signals and node checks": (
        "max_restarts", "spare_nodes", "hang_timeout", "total_time", "requeue", "signal", "signal_before",
        "health_check", "fabric_check", "node_memory",
    ),
    "Data and results": ("stage_in", "stage_out", "artifacts", "tracker", "tracking", "sample", "notify"),
    "Job files": ("assignments", "stage"),
}  # fmt: skip


def job_options(command: _Command) -> _Command:
    """Add the options that describe a job."""
    for add_option in reversed(_JOB_OPTIONS):
        command = add_option(command)
    return command


def resource_options(command: _Command) -> _Command:
    """Add the options that describe the resources of a job."""
    for add_option in reversed((*_RESOURCE_OPTIONS, _node_type_option, _sbatch_option, transport_option)):
        command = add_option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=completers.complete_clusters,
    help="Select only runs on this cluster.",
)
job_argument = click.argument("job", required=False, metavar="[JOB]", shell_complete=completers.complete_jobs)


def parse_ranks(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """Return the first and the last rank of each range of a set such as ``0,3-7``.

    Raises:
        RequestInvalid: the text is no such set.
    """
    if text is None:
        return None
    ranges = []
    for range_text in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", range_text.strip())
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise RequestInvalid([f"--rank {text!r}: write ranks and ranges like 0,3-7"])
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return tuple(ranges)
