"""Answers of a login node, composed of recorded parts."""

from __future__ import annotations

from tests.slurm import recorded

HOST = "name=login1\nuser=ada\ndomain=login1.lab.example.org\npython=python3\n"
PARTITIONS = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A "
    "MaxNodes=UNLIMITED MaxTime=1-00:00:00 OverSubscribe=NO State=UP TotalCPUs=16 TotalNodes=2\n"
)
MPI = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
MODULES = "/apps/modules/Core:\ncuda/12.4(default)\ncuda/12.8\ngcc/13.2\nnccl/2.21 (L)\n"
FOLDERS = (
    "HOME=/home/ada\nSCRATCH=/scratch/ada\n"
    "df=/home/ada nfs:/home nfs4 104857600 1048576 103809024 1% /home\n"
    "df=/scratch/ada 10.0.0.1@tcp:/fs lustre 1099511627776 1 1099511627775 1% /scratch\n"
)


def join_parts(**parts: str) -> str:
    """Join the parts of an answer as the shell script does."""
    return "noise of a login shell\n" + "".join(f"\n\x1e{name}\n{text}" for name, text in parts.items())


def survey_output(version: str, **parts: str) -> str:
    """Return the answer of a login node with this Slurm version."""
    result = {
        "host": HOST,
        "config": recorded.read(version, "config.txt"),
        "nodes": recorded.read(version, "nodes.txt"),
        "partitions": PARTITIONS,
        "mpi": MPI,
        "modules": MODULES,
        "folders": FOLDERS,
    }
    return join_parts(**{**result, **parts})


def node_line(name: str, gres: str = "(null)", **values: str) -> str:
    """Return a line of ``scontrol -o show node``."""
    result = {
        "CPUTot": "64", "Sockets": "2", "CoresPerSocket": "32", "ThreadsPerCore": "1", "RealMemory": "512000",
        "State": "IDLE", "Partitions": "main", "ActiveFeatures": "(null)", "NodeAddr": name, **values,
    }  # fmt: skip
    words = " ".join(f"{key}={value}" for key, value in result.items())
    return f"NodeName={name} Arch=x86_64 Gres={gres} {words}\n"
