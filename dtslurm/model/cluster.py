"""Cluster profiles: the values that the files in ``cluster_profiles/`` hold.

Units: memory in Slurm's notation (internally MiB), rates in Gb/s, bandwidth in GB/s, times in seconds.
Unknown values are absent (None or empty), never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from dtslurm.model.access import Access
from dtslurm.model.paths import RUN_ROOT
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass

GpuRequest = Literal["gpus-per-node", "gpus-per-node-typed", "gres", "gres-typed", "constraint", "none"]
Permission = Literal["allowed", "forbidden", "required"]


@dataclass(frozen=True, kw_only=True)
class Login:
    """How the cluster is reached; without ``host``, this machine is a login node.

    Attributes:
        python: a Python of version 3.6 or later on the login node, where ``python3`` there is none.
    """

    host: str | None = None
    user: str | None = None
    python: str | None = None
    transport: Literal["auto", "local", "openssh", "paramiko"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What holds in one partition: limits for checks before queuing, and what jobs request there.

    Attributes:
        node_type: the type of all its nodes.
        qos: the QOS of jobs there that request none, in place of the cluster's.
    """

    max_time: Walltime | None = None
    max_nodes: int | None = None
    node_type: str | None = None
    qos: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlurmCustoms:
    """A site's rules for requests: the required options and their forms.

    Attributes:
        gpu_request: the form of GPU requests at this site; ``typed`` forms name the GPU's Slurm type,
            where the node type has one (nodes with GPUs of several makes have none to request);
            ``constraint`` selects GPU nodes by the constraint alone, so each type with GPUs must have one, or
            slurm has; ``none`` means whole nodes come with their GPUs and no GPU option may be given.
        mem: whether ``--mem`` may, must or must not be given.
        default_mem: ``--mem`` of a job that names none. 0, all of a node's memory, is for sites where Slurm's
            own default is small; a job that leaves some of a node's GPUs to others requests none then.
        export: whether ``--export`` may be given.
        requeue: whether jobs may be requeued.
        go_on_by: how a run gets its next job: ``requeue``, or a successor that waits for this job's end
            (``afterany``) or for all jobs of its name (``singleton``). Left out, requeue if that is allowed.
        start_now: whether a requeued job may start before Slurm's pause of two minutes is over, which its
            owner may ask for; the pause lets nodes forget the job's old credential.
        requeue_exit_codes: exit codes that make this site's Slurm requeue by itself (slurm.conf RequeueExit).
        min_poll_s: the shortest time between two state queries that the site bears, seconds.
        mpi: srun's ``--mpi`` for ranks of MPI and Horovod; other ranks need no PMI.
        gpu_bind: srun's ``--gpu-bind``. Left out, every rank sees all of the job's GPUs on its node;
            with ``none`` Slurm 22.05 leaves CUDA_VISIBLE_DEVICES unset, right where cgroups hide the rest.
        host_suffix: what to append to a host name for its fast network (JUWELS: ``i``).
        head_address: address of the head node where host names do not resolve.
        extra_options: sbatch options that every job needs, as ``--option=value``.
        partition: where jobs go that request none, several as ``a,b``.
        srun_options: srun options that every step needs, as ``--option=value``; none that dtslurm sets.
        version: the Slurm that these customs were seen with, as ``24.11.5``.
    """

    version: str | None = None
    account: str | None = None
    account_required: bool = False
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpu_request: GpuRequest = "gpus-per-node"
    gpu_bind: str | None = None
    cpu_bind: str | None = None
    distribution: str | None = None
    mem: Permission = "allowed"
    default_mem: Memory | None = None
    export: Permission = "allowed"
    requeue: Permission = "allowed"
    start_now: bool = False
    go_on_by: Literal["requeue", "afterany", "singleton"] | None = None
    requeue_exit_codes: tuple[int, ...] = ()
    exclusive: bool = False
    default_time: Walltime | None = None
    max_time: Walltime | None = None
    max_nodes: int | None = None
    max_array_size: int | None = None
    min_poll_s: float = 30.0
    host_suffix: str | None = None
    head_address: str | None = None
    mpi: str | None = None
    extra_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    partitions: Mapping[str, Partition] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of a node; ``slurm_type`` is the name in ``--gres=gpu:TYPE:N``, ``memory`` is per GPU.

    Attributes:
        price: what one of them costs for an hour, in ``currency``.
        currency: its code of three letters (``EUR``), or whatever unit the site counts in.
    """

    model: str
    count: int
    memory: Memory | None = None
    slurm_type: str | None = None
    vendor: Literal["nvidia", "amd", "intel", "other"] = "nvidia"
    price: float | None = None
    currency: str | None = None


@dataclass(frozen=True, kw_only=True)
class LocalDisk:
    """Disk on the node itself; ``flag`` is the sbatch option that grants it."""

    path: str
    size: Memory | None = None
    flag: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Nics:
    """Network adapters of a node; ``rate_gbps`` is per port, in Gb/s."""

    model: str | None = None
    count: int | None = None
    rate_gbps: float | None = None


@dataclass(frozen=True, kw_only=True)
class IntraNode:
    """The link between GPUs of one node; ``bandwidth_gbs`` is per GPU, one direction, in GB/s."""

    kind: Literal["nvlink", "nvswitch", "xgmi", "pcie", "other"]
    bandwidth_gbs: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """One kind of node.

    Attributes:
        threads_per_core: hardware threads; 1 where the site has SMT off.
        usable_cores: cores a job may use where the site reserves some (Frontier, LUMI: 56 of 64).
        rank_cpus: the CPUs beside each GPU of a node, as ``49-55,113-119``, in the order of the GPUs. A job
            with all GPUs of a node and one rank for each, and without a number of CPUs for a rank, binds its
            ranks to them, whatever the launcher.
        memory: memory a job may request.
        constraint: what chooses these nodes among others of their partition.
        partition: where jobs go that request such nodes and no partition.
    """

    gpus: Gpus | None = None
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int = 1
    numa_nodes: int | None = None
    usable_cores: int | None = None
    rank_cpus: tuple[str, ...] = ()
    cpus: int | None = None
    memory: Memory | None = None
    local_disk: LocalDisk | None = None
    nics: Nics | None = None
    intra_node: IntraNode | None = None
    constraint: str | None = None
    partition: str | None = None

    @property
    def schedulable_cpus(self) -> int | None:
        """CPUs of such a node as Slurm counts them: ``cpus`` if given, else usable cores times threads."""
        if self.cpus is not None:
            return self.cpus
        cores = self.usable_cores
        if cores is None and self.sockets is not None and self.cores_per_socket is not None:
            cores = self.sockets * self.cores_per_socket
        return None if cores is None else cores * self.threads_per_core

    @property
    def gpu_count(self) -> int:
        """The number of GPUs of such a node, 0 if it has none."""
        return self.gpus.count if self.gpus else 0


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable with the reason it is set; in a file its value alone will do.

    Attributes:
        value: ``$NAME`` and ``${NAME}`` in it stand for variables as the job has them after its modules and
            setup lines; all else is taken as it is.
    """

    value: str
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between nodes and the settings that libraries need for it.

    Attributes:
        kind: the family; it sets no variable, environment_from does.
        hcas: adapters that must be up in cluster check and the health check; they set no variable.
        interfaces: network interfaces that must be up in cluster check; they set no variable.
        environment_from: a file of templates/fabrics with the known settings of such a network; the values
            here have precedence, and a variable set to null is left out.
        environment: variables of jobs on several nodes.
        setup: shell lines of jobs on several nodes, run as they are.
        mounts: files that containers need to use the network.
        expected_busbw_gbs: bus bandwidth of an all-reduce over nodes, GB/s of each rank as NCCL's tests count
            it; --fabric-check fails below half of it.
    """

    kind: Literal[
        "infiniband", "roce", "slingshot", "efa", "tcpx", "tcpxo", "gib", "omnipath", "ethernet", "loopback"
    ]
    rate_gbps: float | None = None
    hcas: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    expected_busbw_gbs: float | None = None
    environment_from: str | None = None
    environment: Mapping[str, Variable] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentSetup:
    """What the batch script does before training starts, and when the job ends.

    Attributes:
        login_shell: start the script with ``bash -l``, so that ``module`` and site defaults are there.
        modules: loaded in this order.
        setup: shell lines, run as they are.
        teardown: shell lines to run when the job ends, after those of the job.
        python: the interpreter to use on the cluster.
        offline: compute nodes have no internet.
    """

    login_shell: bool = True
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)
    python: str | None = None
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class ContainerRuntime:
    """The container runtime the site offers.

    Attributes:
        runtime: its name; ``none`` where containers are not to be had.
        mounts: folders every container needs, as ``SRC[:DST[:ro]]``.
        options: options of the runtime's own that the site requires, such as ``--module=gpu,nccl-plugin``.
    """

    runtime: str = "none"
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where things go; paths may use ``~`` and environment variables of the cluster side.

    Attributes:
        node_memory: a file in which a team notes nodes that were found bad; each of them must be able to
            write it.
    """

    run_root: str = RUN_ROOT
    scratch: str | None = None
    node_memory: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Everything dtslurm knows of one cluster.

    Attributes:
        recognise: names of this cluster that ``cluster discover`` knows it by, ``*`` for any text: Slurm's
            ClusterName, full names of login nodes. A cluster called as the profile needs none.
        checked: how the values were checked and when, as ``documentation 2026-08`` or ``on a live cluster
            2026-08-14``. A profile that extends this one does not take it over.
        sample: whether jobs note the use of their nodes' GPUs, network, CPU and memory by default.
        notify: names of secrets with URLs of Apprise, to which messages about every run are sent.
    """

    name: str
    title: str | None = None
    checked: str | None = None
    recognise: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    scheduler: Literal["slurm", "local"] = "slurm"
    login: Login = field(default_factory=Login)
    slurm: SlurmCustoms = field(default_factory=SlurmCustoms)
    node_types: Mapping[str, NodeType] = field(default_factory=dict)
    default_node_type: str | None = None
    fabric: Fabric | None = None
    environment: EnvironmentSetup = field(default_factory=EnvironmentSetup)
    container: ContainerRuntime = field(default_factory=ContainerRuntime)
    paths: Paths = field(default_factory=Paths)
    default_launcher: str | None = None
    sample: bool = True
    notify: tuple[str, ...] = ()

    @property
    def access(self) -> Access:
        """How dtslurm reaches and queries the cluster."""
        return Access(
            name=self.name,
            scheduler=self.scheduler,
            host=self.login.host,
            user=self.login.user,
            python=self.login.python,
            transport=self.login.transport,
            recognise=self.recognise,
            min_poll_s=self.slurm.min_poll_s,
        )

    @property
    def usual_node_type(self) -> str | None:
        """The name of the default node type, else of the only one."""
        only_type = next(iter(self.node_types)) if len(self.node_types) == 1 else None
        return self.default_node_type or only_type

    def node_type(self, name: str | None) -> NodeType | None:
        """Return the node type of a name, by default the usual type; see `destination` for a job's type."""
        name = name or self.usual_node_type
        return self.node_types.get(name) if name else None
