"""A job from request to record: what is asked, what it resolves to, what is sent, what is remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from dtslurm.model.state import JobStatus
from dtslurm.model.units import Memory, Walltime


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What to ask of the scheduler, in sbatch's words; None means "as the profile or Slurm decides".

    ``ntasks_per_node`` is the number of ranks (training processes) on a node whatever the launcher, and
    ``cpus_per_task`` the CPUs of each of them.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: Memory | None = None
    time: Walltime | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    node_type: str | None = None


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
        signal_before: seconds before the time limit at which training code gets ``signal``.
        container: image in which every rank runs, if any: a file or a reference.
        container_mounts: further mounts, as ``SRC[:DST[:ro]]``.
        fabric_check: measure the network between all ranks before training, and do not start on a bad one.
        sbatch_options: options passed on to sbatch unread, as ``--option=value``.
        secrets: names of variables whose values are in a file of the run directory.
        launcher_options: options of the launcher's own, as ``key=value``.
        template: a base template of the user's own instead of ``base.sbatch.j2``.
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
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    array: str | None = None
    dependency: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    signal: str = "USR2"
    signal_before: int | None = None
    max_restarts: int = 0
    container: str | None = None
    container_mounts: tuple[str, ...] = ()
    fabric_check: bool = False
    sbatch_options: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    template: str | None = None


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


def mark(token: str, script_hash: str) -> str:
    """Return the ``--comment`` by which the job of a submission is known again."""
    return f"dtslurm:{token}:{script_hash}"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What the store remembers of one run (``job.json``).

    Attributes:
        profile: path of the cluster's profile, which may lie in a project that is not the current one.
        phase: ``planned`` (written, sbatch not yet called), ``submitted``, ``unknown`` (sbatch's answer was
            lost) or ``withdrawn`` (no job came of it, and none can any more).
        job_id: the scheduler's number, None until it is known.
        transport: how the cluster was reached, if not as its profile says.
        mirror: where this machine keeps copies of the run's files, if the run directory is on another.
        script_hash: as in `Submission`; a job found by its token must carry it too.
        final: the last observations (one, or one per array task) once the job is over.
    """

    token: str
    cluster: str
    name: str
    run_dir: str
    phase: str
    created_at: float
    profile: str = ""
    transport: str = ""
    mirror: str = ""
    job_id: str | None = None
    script_hash: str = ""
    array: str | None = None
    world_size: int = 1
    ranks_per_node: int = 1
    launcher: str = ""
    script: str = ""
    command: str = ""
    work_dir: str = ""
    time_limit: int | None = None
    restarts: int = 0
    final: tuple[JobStatus, ...] = ()

    @property
    def folder(self) -> str:
        """Where the run's files, or copies of them, are on this machine."""
        return self.mirror or self.run_dir

    @property
    def comment(self) -> str:
        """What marks the run's job in Slurm."""
        return mark(self.token, self.script_hash)


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
