"""A job from request to record: `Resources`, `JobSpec`, `TaskLayout` and `Submission`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256

from dtslurm.model.jobs.options import JobSettings, Placement
from dtslurm.model.jobs.roles import WITH_MAIN, Roles, RoleSpec
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.runs.record import JobRecord, mark
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass

__all__ = ["JobRecord", "JobSpec", "LogLine", "Resources", "Submission", "TaskLayout"]


@dataclass(frozen=True, kw_only=True)
class Resources(Placement):
    """The resources to request from the scheduler."""

    mem: Memory | None = None
    time: Walltime | None = None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The part of a running job in which a run is started.

    Attributes:
        nodes: the names of the nodes that the run uses; the first one runs the batch script.
    """

    job_id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobSettings):
    """A training job as its user describes it.

    Attributes:
        script: the training script, an executable, or a module name if ``module`` is true.
        work_dir: absolute path of the job's working directory on the cluster.
        python: interpreter for ``.py`` scripts and modules.
        activate: the folder of a virtual or conda environment to activate in the job, if any.
        env: variables to set in the job, in order.
        spare_nodes: additional nodes of the allocation, to replace lost nodes.
        hang_timeout: seconds without output that count as a hang; 0 learns the value, a negative value turns
            hang detection off.
        total_time: seconds of training in total, over several time limits.
        resumes: whether the training script's text shows that it loads its checkpoint when it starts.
        container: the image in which every rank runs, if any: a file or a reference.
        fabric_check: measure the network between all ranks before training, and do not train on a bad one.
        sample: record each node's telemetry in ``metrics/`` while the job runs.
        stage_in: data that each node copies to its local disk first, as ``SRC:DST:OPTION,...`` with a name.
        stage_out: data that is copied back on the early signal and at the end, in the same form.
        sbatch_options: options passed on to sbatch without interpretation, as ``--option=value``.
        launcher_options: options of the launcher, None for an option without a value.
        roles: the roles beside the training, None for a run of one role.
        trials: set if the array's tasks are trials of a sweep.
        notify: the addresses to which messages about the run are sent, without secrets.
        separate_streams: also write stdout and stderr of each rank to separate files.
        allocation: the allocation in which the job runs as a step, None for a job of its own.
        idle_limit: set if the job only holds an allocation: it ends after these seconds without a step.
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
    env: tuple[tuple[str, str], ...] = ()
    signal: str = "USR2"
    spare_nodes: int = 0
    hang_timeout: int | None = None
    total_time: int | None = None
    resumes: bool = False
    container: str | None = None
    fabric_check: bool = False
    sample: bool = True
    stage_in: tuple[str, ...] = ()
    stage_out: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    roles: Roles | None = None
    trials: Trials | None = None
    separate_streams: bool = False
    allocation: Allocation | None = None
    idle_limit: int | None = None
    notify: tuple[str, ...] = ()

    @property
    def other_roles(self) -> tuple[RoleSpec, ...]:
        """The roles beside the training."""
        return self.roles.others if self.roles is not None else ()

    @property
    def extra_nodes(self) -> int:
        """The further nodes beside those of the ranks: spare nodes, and those of other roles.

        Nodes of roles in a component of their own do not count.
        """
        return self.spare_nodes + (self.roles.nodes if self.roles is not None else 0)

    @property
    def supervised(self) -> bool:
        """Whether an option requires the supervisor in the job."""
        return self.acts_on_failures or bool(self.notify)

    @property
    def acts_on_failures(self) -> bool:
        """Whether the supervisor does more than to report events."""
        return self.restarted or bool(self.health_check) or bool(self.other_roles)

    @property
    def restarted(self) -> bool:
        """Whether an option allows more than one attempt."""
        restart_options = (self.max_restarts, self.hang_timeout, self.total_time)
        restarts_with_role = any(role.restart == WITH_MAIN for role in self.other_roles)
        return (
            bool(self.spare_nodes)
            or restarts_with_role
            or any(value is not None for value in restart_options)
        )

    @property
    def requeued(self) -> bool:
        """Whether Slurm may requeue the job; by default, if the run can resume from its checkpoints.

        Slurm requeues a job by itself when one of its nodes fails. Code that does not load its checkpoint
        would then start from the beginning, and overwrite the results of the attempt before.
        """
        return self.restarted or self.resumes if self.requeue is None else self.requeue


@dataclass(frozen=True, kw_only=True)
class TaskLayout:
    """How many ranks run on which nodes, from the request and the node type.

    Attributes:
        cpus_per_rank: None if neither the request nor the node type sets it.
        mem: memory per node to request, None to request none.
        one_process: the training script runs once, on the first node, whatever the number of nodes (Ray's
            driver).
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
        """The number of ranks of the whole job."""
        return 1 if self.one_process else self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A rendered job, immutable: ``--dry-run`` prints exactly what ``submit`` sends.

    Attributes:
        token: random identifier of this submission, part of sbatch's ``--comment``.
        run_dir: absolute path of the run directory on the cluster.
        step_script: the script that runs ``script`` as a step of an allocation; empty for a job of its own.
        script: the sbatch script; bytes that are not UTF-8 are surrogate-escaped.
        notices: messages for the user, each one line.
        origins: the origin of each value, ``"slurm.partition": "perlmutter.yaml:12"``.
    """

    token: str
    cluster: str
    spec: JobSpec
    layout: TaskLayout
    run_dir: str
    script: str
    step_script: str = ""
    notices: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def allocation(self) -> Allocation | None:
        """The allocation in which the job runs as a step, None for a job of its own."""
        return self.spec.allocation

    @property
    def runs_from_snapshot(self) -> bool:
        """Whether the job works in the copy of the code that is installed with its run directory."""
        return f"{self.spec.work_dir}/".startswith(f"{self.run_dir}/code/")

    @property
    def script_hash(self) -> str:
        """The first 48 bits of the script's SHA-256, in hexadecimal digits."""
        return sha256(self.script.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    @property
    def comment(self) -> str:
        """The text in Slurm's comment that identifies the job as this submission of this script."""
        return mark(self.token, self.script_hash)

    @property
    def full_comment(self) -> str:
        """The identifying text, followed by the comment that the user requested."""
        comment_options = [text for text in self.spec.sbatch_options if text.startswith("--comment=")]
        return " ".join([self.comment, *(text.partition("=")[2] for text in comment_options[-1:])])


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of the output of a rank, a launcher or the batch script.

    Attributes:
        source: the rank's number as text (``3``), ``node0`` for the launcher on a node, or ``batch``.
        text: decoded text without its newline.
    """

    source: str
    text: str
    rank: int | None = None
    attempt: int = 0
    task: str | None = None
