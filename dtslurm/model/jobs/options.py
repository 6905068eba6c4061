"""The options that describe a job, shared by the command line, project files and a job's resources."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement and size of a job, under sbatch's names; None leaves the value to the profile or Slurm.

    ``ntasks_per_node`` is the number of ranks (training processes) per node with every launcher, and
    ``cpus_per_task`` the number of CPUs of each rank.
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
class JobSettings:
    """Options that a job takes exactly as its user gives them.

    Attributes:
        signal_before: seconds before the time limit at which training code gets the early signal.
        health_check: check the nodes before training, and exclude bad ones; None does so if another option
            needs the supervisor.
        setup: shell lines to run before training.
        teardown: shell lines to run when the job ends; the job's exit code stays that of training.
        max_restarts: maximum number of restarts after crashes, after hangs and after node faults, each
            counted separately; None leaves it to the other options.
        output, error: destination of a copy of the batch script's output, in sbatch's filename patterns.
        requeue: whether Slurm may requeue the job, by itself after a node failure; None allows it if the run
            can resume from its checkpoints.
        container_mounts: further mounts, as ``SRC[:DST[:ro]]``.
        artifacts: files to register as results at the end, as patterns of paths in the run directory.
        secrets: names of variables whose values reach the job in a file of its run directory.
        template: the user's own base template instead of ``base.sbatch.j2``.
    """

    array: str | None = None
    dependency: str | None = None
    container_mounts: tuple[str, ...] = ()
    health_check: bool | None = None
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    output: str | None = None
    error: str | None = None
    signal_before: int | None = None
    max_restarts: int | None = None
    requeue: bool | None = None
    template: str | None = None
    artifacts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobOptions(JobSettings, Placement):
    """Options of ``submit`` by their long names, with the same form on the command line and in files.

    Attributes:
        node_memory: exclude the nodes on the bad-node list.
        sample: record each node's GPU, network, CPU and memory use while the job runs.
        spare_nodes: additional nodes of the allocation, to replace lost nodes.
        hang_timeout: duration without output that counts as a hang, or ``auto`` or ``off``.
        sbatch: options passed on to sbatch without interpretation, as ``--option=value``.
        snapshot: whether the job runs from a copy of the code at the time of submission.
        code_include, code_exclude: files to add to the tracked files of the snapshot or to leave out, as in
            .gitignore.
        tracker: experiment trackers to inform about the run: wandb, mlflow, tensorboard, aim.
        stage_in: data to copy to the nodes' local disks, as ``SRC[:DST[:OPTION,...]]``.
        stage_out: folders of the nodes' local disks to copy back, as ``SRC[:DST]``.
        notify: names of secrets with URLs of Apprise to which messages about the run are sent, or such URLs.
    """

    job_name: str | None = None
    launcher: str | None = None
    container: str | None = None
    fabric_check: bool | None = None
    node_memory: bool | None = None
    sample: bool | None = None
    signal: str | None = None
    spare_nodes: int | None = None
    hang_timeout: str | None = None
    sbatch: tuple[str, ...] = ()
    python: str | None = None
    run_root: str | None = None
    chdir: str | None = None
    snapshot: bool | None = None
    code_include: tuple[str, ...] = ()
    code_exclude: tuple[str, ...] = ()
    tracker: tuple[str, ...] = ()
    stage_in: tuple[str, ...] = ()
    stage_out: tuple[str, ...] = ()
    notify: tuple[str, ...] = ()
