"""The configuration files of a test cluster."""

from __future__ import annotations

import os
import random
import shlex
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.software import SlurmUnavailable

# Below the ports that `free_port`, the scripts of jobs and the kernel choose, so that nobody else takes one.
PORTS = range(1088, 5000)
BLOCK = 64  # ports that belong to one cluster
JOB_PORTS = 2500  # how many ports the scripts of jobs choose from


@dataclass(frozen=True)
class Layout:
    """What the configuration depends on."""

    root: Path
    user: str
    nodes: int
    cpus: int
    gpus: int
    gpu_type: str
    port: int
    accounting: bool
    min_job_age: int
    plugin_dir: Path | None
    extra: Sequence[str]

    @property
    def node_names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def munge_socket(self) -> Path:
        return self.root / "run/munge.sock"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def dbd_port(self) -> int:
        return self.port + 1

    @property
    def sql_port(self) -> int:
        return self.port + 2


def claim_ports() -> tuple[int, socket.socket]:
    """The first of BLOCK ports that no other cluster uses, and the claim on them: theirs until it is closed.

    The claim is an abstract socket: every process of this network sees it, and it dies with its holders.
    """
    starts = list(PORTS[::BLOCK])
    random.shuffle(starts)
    for start in starts:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0dtslurm-lab-{start}")
            for port in range(start, start + BLOCK):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            return start, claim
    raise SlurmUnavailable("no free ports on 127.0.0.1")


def first_job_id(port: int, worker: str) -> int:
    """Return the first job id of the cluster with this port, in this process of the suite (gw0, gw1, …).

    Scripts choose one of 2,500 ports by their job's id. Each of six processes gets a sixth of them, because
    another job may choose the same port until a program listens there. The ids of all clusters differ.
    """
    cluster = PORTS.index(port) // BLOCK
    process = int(worker.removeprefix("gw") or 0) % 6
    return (1 + cluster) * 10 * JOB_PORTS + process * (JOB_PORTS // 6) + cluster


def slurm_conf(layout: Layout) -> str:
    """The text of slurm.conf; an extra `Key=Value` line replaces the one here."""
    root = layout.root
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=lab",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={layout.port}",
        "AuthType=auth/munge",
        # A requeued job waits cred_expire + 1 s (121 by default); 5 is the smallest value that Slurm accepts.
        f"AuthInfo=socket={layout.munge_socket},cred_expire=5",
        f"SlurmUser={layout.user}",
        f"SlurmdUser={layout.user}",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/run/slurmctld.pid",
        f"SlurmdPidFile={root}/run/slurmd.%n.pid",
        f"SlurmctldLogFile={root}/log/slurmctld.log",
        f"SlurmdLogFile={root}/log/slurmd.%n.log",
        # At the end of a job slurmctld sends to the ports of its sruns, also of those lost with a node. All
        # nodes share one address here. If another job's srun has been given that port, it takes the message
        # for its own end. That is rarer with a larger range than with the ports that the kernel chooses.
        "SrunPortRange=31000-65535",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",  # without it sacct knows no MaxRSS
        "JobAcctGatherFrequency=task=1",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1,bf_continue",
        "SlurmdParameters=config_overrides",  # eight CPUs a node whatever this machine has
        "DefMemPerCPU=100",
        "ReturnToService=2",
        "RebootProgram=/bin/true",
        "MailProg=/bin/true",
        "SlurmctldTimeout=30",
        "SlurmdTimeout=10",
        "InactiveLimit=0",
        "KillWait=10",  # a job that saves must manage that on a busy machine
        f"MinJobAge={layout.min_job_age}",
        "MaxArraySize=10001",
        "JobRequeue=1",
        f"FirstJobId={first_job_id(layout.port, os.environ.get('PYTEST_XDIST_WORKER', ''))}",
    ]
    if layout.plugin_dir is not None:
        lines.append(f"PluginDir={layout.plugin_dir}")
    if layout.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={layout.dbd_port}",
            f"AccountingStoragePass={layout.munge_socket}",
            "AccountingStorageTRES=gres/gpu",  # or sacct shows no GPUs
        ]
    lines += _nodes_and_partitions(layout, host)
    return "\n".join([*_without_replaced(lines, layout.extra), *layout.extra]) + "\n"


def _nodes_and_partitions(layout: Layout, host: str) -> list[str]:
    lines = ["GresTypes=gpu"] if layout.gpus else []
    gres = f"Gres=gpu:{layout.gpu_type}:{layout.gpus} " if layout.gpus else ""
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={layout.port + 10 + i} "
        f"CPUs={layout.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={layout.cpus} ThreadsPerCore=1 "
        f"RealMemory=4000 {gres}State=UNKNOWN"
        for i, name in enumerate(layout.node_names)
    ]
    short = ",".join(layout.node_names[:2])
    return [
        *lines,
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP",
        f"PartitionName=short Nodes={short} MaxTime=00:10:00 MaxNodes=2 State=UP",
    ]


def _without_replaced(lines: list[str], extra: Sequence[str]) -> list[str]:
    """Lines whose key (for nodes and partitions: key and name) is not set by an extra line."""

    def key(line: str) -> str:
        head = line.split(maxsplit=1)[0] if line.strip() else ""
        repeated = head.lower().startswith(("nodename=", "partitionname=", "nodeset="))
        return (head if repeated else line.partition("=")[0]).strip().lower()

    replaced = {key(line) for line in extra}
    return [line for line in lines if key(line) not in replaced]


def gres_conf(layout: Layout, devices: Sequence[Path]) -> str:
    """The text of gres.conf."""
    nodes = ",".join(layout.node_names)
    lines = [f"NodeName={nodes} Name=gpu Type={layout.gpu_type} File={device}" for device in devices]
    return "\n".join(["AutoDetect=off", *lines]) + "\n"


def slurmdbd_conf(layout: Layout) -> str:
    """The text of slurmdbd.conf."""
    root = layout.root
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={layout.dbd_port}",
        f"SlurmUser={layout.user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={layout.sql_port}",
        "StorageUser=slurm",
        "StoragePass=slurm",
        "StorageLoc=slurm_acct",
        f"LogFile={root}/log/slurmdbd.log",
        f"PidFile={root}/run/slurmdbd.pid",
    ]
    if layout.plugin_dir is not None:
        lines.append(f"PluginDir={layout.plugin_dir}")
    return "\n".join(lines) + "\n"


def hosts(layout: Layout) -> str:
    """This machine's hosts file with the nodes added."""
    own = Path("/etc/hosts")
    text = own.read_text(encoding="utf-8") if own.is_file() else "127.0.0.1 localhost\n"
    return text.rstrip("\n") + f"\n127.0.0.1 {' '.join(layout.node_names)}\n"


def profile(search: str) -> str:
    """This machine's start-up file of login shells, and after it the PATH on which the programs are first."""
    own = Path("/etc/profile")
    text = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else ""
    return f"{text.rstrip()}\nPATH={shlex.quote(search)}:$PATH\n"


def gpu_devices(folder: Path, count: int) -> list[Path]:
    """Character devices that stand in for GPUs: Slurm sets CUDA_VISIBLE_DEVICES for nothing else."""
    made = [folder / f"gpu{i}" for i in range(count)]
    try:
        folder.mkdir(exist_ok=True)
        for device in made:
            _make_null_device(device)
    except OSError:  # not root, or a root without CAP_MKNOD
        pass
    else:
        return made
    dev = Path("/dev")
    terminals = [dev / f"tty{i}" for i in range(count)]
    names = sorted(p for p in dev.iterdir() if p.name not in {"tty", "console"})
    for choice in (terminals, names):
        usable = [p for p in choice if p.exists() and stat.S_ISCHR(p.stat().st_mode)]
        if len(usable) >= count:
            return usable[:count]
    raise SlurmUnavailable(f"no {count} character devices in /dev to stand in for GPUs")


def _make_null_device(device: Path) -> None:
    device.unlink(missing_ok=True)
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    device.chmod(0o666)
