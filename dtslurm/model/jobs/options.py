"""The options that describe a job, as the command line, a project's file and a job's resources share them."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a job runs and on how much, in sbatch's words; None means "as the profile or Slurm decides".

    ``ntasks_per_node`` is the number of ranks (training processes) on a node whatever the launcher, and
    ``cpus_per_task`` the CPUs of each of them.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    node_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobOptions(Placement):
    """Options of ``submit`` by their long names, those that are written alike wherever they are given.

    Attributes:
        signal_before: seconds before the time limit at which training code gets ``signal``.
        health_check: look at the nodes before training, and leave out bad ones.
        node_memory: leave out nodes that are known to be bad.
        sample: note each node's GPUs, network, CPU and memory while the job runs.
        setup: shell lines to run before training.
        teardown: shell lines to run when the job ends; the job's exit code stays that of training.
        max_restarts, spare_nodes, hang_timeout: what is done about failures.
        output, error: where a copy of the batch script's output goes, in sbatch's filename patterns.
        requeue: whether Slurm may queue the job again, by itself after a node failure; None allows requeueing
            where the run can go on from its checkpoints.
        sbatch: options passed on to sbatch unread, as ``--option=value``.
        snapshot: whether the job runs from a copy of the code as it is when it is submitted.
        code_include, code_exclude: what the copy holds beyond or without what git tracks, as in .gitignore.
        tracker: experiment trackers to tell of the run: wandb, mlflow, tensorboard, aim.
        stage_in: data to bring to the nodes' local disks, as ``SRC[:DST[:OPTION,...]]``.
        stage_out: folders of the nodes' local disks to bring back, as ``SRC[:DST]``.
        artifacts: files to register as results at the end, as patterns of paths in the run directory.
        secrets: names of variables whose values reach the job in a file of its run directory.
    """

    job_name: str | None = None
    array: str | None = None
    dependency: str | None = None
    launcher: str | None = None
    container: str | None = None
    container_mounts: tuple[str, ...] = ()
    fabric_check: bool | None = None
    health_check: bool | None = None
    node_memory: bool | None = None
    sample: bool | None = None
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    output: str | None = None
    error: str | None = None
    signal: str | None = None
    signal_before: int | None = None
    max_restarts: int | None = None
    spare_nodes: int | None = None
    hang_timeout: str | None = None
    requeue: bool | None = None
    sbatch: tuple[str, ...] = ()
    template: str | None = None
    python: str | None = None
    run_root: str | None = None
    chdir: str | None = None
    snapshot: bool | None = None
    code_include: tuple[str, ...] = ()
    code_exclude: tuple[str, ...] = ()
    tracker: tuple[str, ...] = ()
    stage_in: tuple[str, ...] = ()
    stage_out: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
