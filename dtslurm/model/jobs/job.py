"""A job from request to record: what is asked, what it resolves to, what is sent, what is remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256

from dtslurm.model.jobs.options import Placement
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.runs.record import JobRecord, mark
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass

__all__ = ["JobRecord", "JobSpec", "LogLine", "Resources", "Submission", "TaskLayout"]


@dataclass(frozen=True, kw_only=True)
class Resources(Placement):
    """What to ask of the scheduler."""

    mem: Memory | None = None
    time: Walltime | None = None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One training job as its user describes it.

    Attributes:
        script: the training script, an executable, or a module name if ``module`` is true.
        work_dir: absolute folder on the cluster in which the job runs.
        python: interpreter for ``.py`` scripts and modules.
        activate: a virtual or conda environment's folder to activate in the job, if any.
        env: variables to set in the job, in order.
        array: sbatch's ``--array`` expression.
        output, error: where a copy of the batch script's output goes, in sbatch's filename patterns.
        signal_before: seconds before the time limit at which training code gets ``signal``.
        max_restarts: how often it may start again after crashes, after hangs and after node faults, each
            counted by itself; None leaves it to what else is asked for.
        spare_nodes: nodes to ask for beside those that train, to take the place of lost ones.
        hang_timeout: silent seconds that count as a hang; 0 learns them, negative looks for none.
        total_time: seconds of training altogether, over several time limits.
        requeue: whether Slurm may queue the job again; None allows requeueing where the run can go on.
        resumes: the training script loads its checkpoint when it starts, as far as its text tells.
        container: image in which every rank runs, if any: a file or a reference.
        container_mounts: further mounts, as ``SRC[:DST[:ro]]``.
        fabric_check: measure the network between all ranks before training, and do not start on a bad one.
        health_check: look at the nodes before training, and leave out bad ones; None does so where
            something else brings the supervisor.
        sample: note in ``metrics/`` how each node is doing while the job runs.
        stage_in: what each node brings to its local disk first, as ``SRC:DST:OPTION,...`` with a name.
        stage_out: what is brought back from there on the early signal and at the end, likewise.
        artifacts: patterns of what is registered as results at the end.
        sbatch_options: options passed on to sbatch unread, as ``--option=value``.
        secrets: names of variables whose values are in a file of the run directory.
        launcher_options: options of the launcher, None for one without a value.
        template: a base template of the user's own instead of ``base.sbatch.j2``.
        trials: the array's tasks are trials of a sweep.
        separate_streams: write stdout and stderr of each rank also to separate files.
    """

    name: str
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    work_dir: str
    python: str = "python3"
    activate: str | None = None
    resources: Resources = field(default_factory=Resources)
    launcher: str
    launcher_options: Mapping[str, str | None] = field(default_factory=dict)
    array: str | None = None
    dependency: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    output: str | None = None
    error: str | None = None
    signal: str = "USR2"
    signal_before: int | None = None
    max_restarts: int | None = None
    spare_nodes: int = 0
    hang_timeout: int | None = None
    total_time: int | None = None
    requeue: bool | None = None
    resumes: bool = False
    container: str | None = None
    container_mounts: tuple[str, ...] = ()
    fabric_check: bool = False
    health_check: bool | None = None
    sample: bool = True
    stage_in: tuple[str, ...] = ()
    stage_out: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    template: str | None = None
    trials: Trials | None = None
    separate_streams: bool = False

    @property
    def supervised(self) -> bool:
        """Whether something was asked for that needs the supervisor in the job."""
        return self.restarted or bool(self.health_check)

    @property
    def restarted(self) -> bool:
        """Whether something was asked for that may mean more than one attempt."""
        asked = (self.max_restarts, self.hang_timeout, self.total_time)
        return bool(self.spare_nodes) or any(value is not None for value in asked)

    @property
    def requeued(self) -> bool:
        """Whether Slurm may queue the job again: where nothing was asked for, if the run can go on.

        Slurm queues a job again by itself when its node fails. Code that does not load its checkpoint would
        then start from the beginning, over the results of the attempt before.
        """
        return self.restarted or self.resumes if self.requeue is None else self.requeue


@dataclass(frozen=True, kw_only=True)
class TaskLayout:
    """How many ranks run where, resolved from the request and the node type.

    Attributes:
        cpus_per_rank: None where neither request nor node type tells.
        mem: memory per node to ask for, None to ask for nothing.
        one_process: the training script runs once, on the first node, whatever the nodes (Ray's driver).
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int | None
    mem: Memory | None
    time: Walltime | None
    one_process: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return 1 if self.one_process else self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A rendered job, frozen: what ``--dry-run`` prints is what ``submit`` sends.

    Attributes:
        token: random identity of this submission, carried in sbatch's ``--comment``.
        run_dir: absolute folder of this run on the cluster.
        script: the sbatch script; bytes that are not UTF-8 are surrogate-escaped.
        notices: things the user should know, each one line.
        origins: where each value came from, ``"slurm.partition": "perlmutter.yaml:12"``.
    """

    token: str
    cluster: str
    spec: JobSpec
    layout: TaskLayout
    run_dir: str
    script: str
    notices: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def script_hash(self) -> str:
        """The first 48 bits of the script's SHA-256, in hexadecimal digits."""
        return sha256(self.script.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    @property
    def comment(self) -> str:
        """What marks the job in Slurm as this submission of this script."""
        return mark(self.token, self.script_hash)

    @property
    def full_comment(self) -> str:
        """The mark, and after it the comment that the user asked for."""
        asked = [text for text in self.spec.sbatch_options if text.startswith("--comment=")]
        return " ".join([self.comment, *(text.partition("=")[2] for text in asked[-1:])])


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of one rank's (or of the batch script's) output.

    Attributes:
        source: ``rank 3``'s number as text, ``node0`` for the launcher on a node, or ``batch``.
        text: decoded text without its newline.
    """

    source: str
    text: str
    rank: int | None = None
    attempt: int = 0
    task: str | None = None
