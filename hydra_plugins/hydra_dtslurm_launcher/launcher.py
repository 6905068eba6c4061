"""hydra-submitit-launcher on dtslurm's executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher


@dataclass
class DtslurmQueueConf(BaseQueueConf):
    """submitit's parameters, and those of ``dtslurm submit`` by long names; ``cluster`` is a profile."""

    _target_: str = "hydra_plugins.hydra_dtslurm_launcher.launcher.DtslurmLauncher"
    cluster: Optional[str] = None
    transport: Optional[str] = None
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None
    reservation: Optional[str] = None
    node_type: Optional[str] = None
    launcher: Optional[str] = None
    container: Optional[str] = None
    run_root: Optional[str] = None
    signal_before: Optional[int] = None
    array_parallelism: int = 256
    max_num_timeout: int = 0
    env: Dict[str, str] = field(default_factory=dict)
    setup: List[str] = field(default_factory=list)


class DtslurmLauncher(BaseSubmititLauncher):
    """Runs every job of a multirun as a task of one array."""

    _EXECUTOR = "dtslurm"


ConfigStore.instance().store(
    group="hydra/launcher", name="dtslurm", node=DtslurmQueueConf(), provider="dtslurm"
)
