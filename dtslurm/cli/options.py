"""Options shared by several commands. Names and letters are sbatch's where sbatch has the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dtslurm.cli import completers

_Command = TypeVar("_Command", bound=Callable[..., Any])

transport_option = click.option(
    "--transport", type=click.Choice(["local", "openssh", "paramiko"]), help="How to get there."
)

_JOB_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--cluster",
        metavar="NAME",
        shell_complete=completers.clusters,
        help="Cluster profile. [default: see dtslurm doctor]",
    ),
    click.option("-J", "--job-name", metavar="NAME", help="[default: the script's name]"),
    click.option("-N", "--nodes", type=int, metavar="N", help="[default: 1]"),
    click.option(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs on a node. [default: all where --node-type or the profile names the node type, else none]",
    ),
    click.option(
        "--ntasks-per-node",
        type=int,
        metavar="N",
        help="Ranks on a node, whatever the launcher. [default: one per GPU, else 1]",
    ),
    click.option("-c", "--cpus-per-task", type=int, metavar="N", help="CPUs of each rank."),
    click.option("--mem", metavar="SIZE", help="Memory per node, such as 480G."),
    click.option("-t", "--time", metavar="TIME", help="Time limit: minutes, HH:MM:SS, D-HH:MM:SS or 2h30m."),
    click.option("-p", "--partition", metavar="NAME"),
    click.option("-A", "--account", metavar="NAME"),
    click.option("-q", "--qos", metavar="NAME"),
    click.option("-C", "--constraint", metavar="FEATURES"),
    click.option("-x", "--exclude", metavar="NODES"),
    click.option("-w", "--nodelist", metavar="NODES"),
    click.option("--reservation", metavar="NAME"),
    click.option("-a", "--array", metavar="INDICES", help="Such as 0-9 or 0-99%10."),
    click.option(
        "-o", "--output", metavar="PATTERN", help="Write the batch script's output there too: logs/%x-%j.out."
    ),
    click.option("-e", "--error", metavar="PATTERN", help="The same for its standard error."),
    click.option("-d", "--dependency", metavar="EXPR", help="Such as afterok:1234."),
    click.option("--node-type", metavar="NAME", help="One of the profile's node types."),
    click.option(
        "-l",
        "--launcher",
        metavar="NAME",
        help="A launcher, or auto: what the script asks for. [default: torchrun, or single for one rank]",
    ),
    click.option(
        "--launcher-option",
        "launcher_options",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="An option of the launcher. One that dtslurm does not read is passed on.",
    ),
    click.option("--container", metavar="IMAGE", help="Run every rank in this image: a file or a reference."),
    click.option("--container-mount", "container_mounts", multiple=True, metavar="SRC[:DST[:ro]]"),
    click.option(
        "--env", multiple=True, metavar="NAME[=VALUE]", help="Set in the job; the bare name copies yours."
    ),
    click.option("--setup", multiple=True, metavar="CMD", help="Shell line to run before training."),
    click.option(
        "--teardown", multiple=True, metavar="CMD", help="Shell line to run when the job ends, failed or not."
    ),
    click.option(
        "--signal", metavar="NAME", help="Early signal, also as sbatch's B:USR1@300. [default: USR2]"
    ),
    click.option(
        "--signal-before",
        type=int,
        metavar="SECONDS",
        help="Send the early signal that long before the limit.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        help="Start again after failures that need not come again: crashes, hangs and node faults, "
        "N times each. [default: never]",
    ),
    click.option(
        "--spare-nodes",
        type=click.IntRange(min=0),
        metavar="K",
        help="Ask for K nodes more, to take the place of lost ones within the job.",
    ),
    click.option(
        "--hang-timeout",
        metavar="TIME",
        help="Start again when no rank says or does anything for so long; auto learns how long.",
    ),
    click.option(
        "--total-time",
        metavar="TIME",
        help="Go on over time limits until training took so long, such as 7-00:00:00.",
    ),
    click.option(
        "--requeue/--no-requeue",
        default=None,
        help="Let Slurm queue the job again, as after a node failure. [default: if the run can go on]",
    ),
    click.option(
        "--fabric-check/--no-fabric-check",
        default=None,
        help="Measure the network between all ranks first; end with 86 where it is bad.",
    ),
    click.option(
        "--health-check/--no-health-check",
        default=None,
        help="Look at every node first, and leave out bad ones. [default: with restarts]",
    ),
    click.option(
        "--node-memory/--no-node-memory",
        default=None,
        help="Leave out nodes known to be bad: dtslurm cluster nodes. [default: node-memory]",
    ),
    click.option(
        "--sample/--no-sample",
        default=None,
        help="Note each node's GPUs, network, CPU and memory while it runs. [default: sample]",
    ),
    click.option(
        "--stage",
        "stage_in",
        multiple=True,
        metavar="SRC[:DST[:OPTION,...]]",
        help="Bring this to each node's local disk first; options are shards=, method= and name=.",
    ),
    click.option(
        "--stage-out",
        multiple=True,
        metavar="SRC[:DST]",
        help="Bring this back from local disks, on the early signal and at the end.",
    ),
    click.option(
        "--artifact",
        "artifacts",
        multiple=True,
        metavar="PATTERN",
        help="Register these files of the run directory as its results.",
    ),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="--OPTION",
        help="Pass an option on to sbatch. sbatch's own names work too: --exclusive, --comment TEXT.",
    ),
    click.option("--template", metavar="FILE", help="A base template of your own."),
    click.option(
        "--python", metavar="FILE", help="Interpreter. [default: the active environment's, or uv's]"
    ),
    click.option("-D", "--chdir", metavar="DIR", help="Folder on the cluster to run in, as it is then."),
    click.option(
        "--snapshot/--no-snapshot",
        default=None,
        help="Run from a copy of the code as it is now, not in this folder. [default: over SSH]",
    ),
    click.option(
        "--code-include", multiple=True, metavar="PATTERN", help="Copy these too, as in .gitignore."
    ),
    click.option("--code-exclude", multiple=True, metavar="PATTERN", help="Do not copy these."),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME",
        help="Give the job this variable by a file that only you can read, never in the script.",
    ),
    click.option(
        "--tracker",
        multiple=True,
        metavar="NAME",
        help="Tell wandb, mlflow, tensorboard or aim what the run is, by variables of theirs.",
    ),
    click.option(
        "--tracking",
        multiple=True,
        metavar="KEY=VALUE",
        help="What they are told: project, group, tags, uri, mode.",
    ),
    transport_option,
    click.option(
        "--once",
        metavar="KEY",
        help="Queue at most one job under this key: whoever asks again gets the first one's id.",
    ),
    click.option("--no-check", is_flag=True, default=None, help="Ask the cluster nothing before queueing."),
    click.option("--run-root", metavar="DIR", help="Where run directories go. [default: the profile's]"),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
)


# The sections in the help of submit and render; options in no section come last.
SECTIONS = {
    "What Slurm is asked for": (
        "cluster", "job_name", "nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "mem", "time",
        "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "array",
        "dependency", "output", "error", "node_type", "sbatch",
    ),
    "How ranks start": (
        "launcher", "launcher_options", "container", "container_mounts", "env", "secrets", "setup",
        "teardown", "python", "module", "template",
    ),
    "Code and folders": ("chdir", "snapshot", "code_include", "code_exclude", "run_root"),
    "Going on after failures": (
        "max_restarts", "spare_nodes", "hang_timeout", "total_time", "requeue", "signal", "signal_before",
        "health_check", "fabric_check", "node_memory",
    ),
    "Data and results": ("stage_in", "stage_out", "artifacts", "tracker", "tracking", "sample"),
    "Job files": ("assignments", "stage"),
}  # fmt: skip


def job_options(command: _Command) -> _Command:
    """Add the options that describe a job."""
    for add_option in reversed(_JOB_OPTIONS):
        command = add_option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
cluster_option = click.option(
    "--cluster", metavar="NAME", shell_complete=completers.clusters, help="Only runs on this cluster."
)
job_argument = click.argument("job", required=False, metavar="[JOB]", shell_complete=completers.jobs)
