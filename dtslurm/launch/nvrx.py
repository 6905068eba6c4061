"""``nvrx``: the fault-tolerant launcher of NVIDIA's resiliency extension."""

from __future__ import annotations

from typing import ClassVar

from dtslurm.launch.base import LauncherOption
from dtslurm.launch.torchrun import ELASTIC, Torchrun


class Nvrx(Torchrun):
    """``ft_launcher``, a torchrun that also monitors heartbeats and restarts ranks that hang.

    It supports only c10d rendezvous, so ranks may be on other nodes than in Slurm's numbering. Exit code 93
    means that a new attempt would fail as well; it stays the job's exit code.
    """

    name = "nvrx"
    start_modules = ("nvidia_resiliency_ext",)
    summary = "NVIDIA's ft_launcher: torchrun with heartbeats and restarts"
    program = "ft_launcher"
    agent_module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    own_codes = (93,)
    options: ClassVar = {
        "rdzv_backend": LauncherOption("c10d", "the rendezvous backend", ("c10d",)),
        "max_restarts": LauncherOption("0", "how often the ranks are restarted after a failure or a hang"),
        "nnodes": ELASTIC,
    }


launcher = Nvrx()
