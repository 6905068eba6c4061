"""hydra-submitit-launcher on dtslurm's executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence
from unittest import mock

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher


@dataclass
class DtslurmQueueConf(BaseQueueConf):
    """The keys of ``submitit_slurm``, and options of ``dtslurm submit``; ``cluster`` is a profile."""

    _target_: str = "hydra_plugins.hydra_dtslurm_launcher.launcher.DtslurmLauncher"
    cluster: Optional[str] = None
    transport: Optional[str] = None
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None
    nodelist: Optional[str] = None
    dependency: Optional[str] = None
    comment: Optional[str] = None
    wckey: Optional[str] = None
    mail_type: Optional[str] = None
    mail_user: Optional[str] = None
    exclusive: Optional[bool] = None
    gres: Optional[str] = None
    cpus_per_gpu: Optional[int] = None
    gpus_per_task: Optional[int] = None
    mem_per_gpu: Optional[str] = None
    mem_per_cpu: Optional[str] = None
    reservation: Optional[str] = None
    node_type: Optional[str] = None
    launcher: Optional[str] = None
    container: Optional[str] = None
    run_root: Optional[str] = None
    signal_delay_s: int = 120
    signal_before: Optional[int] = None
    array_parallelism: int = 256
    max_num_timeout: int = 0
    env: Dict[str, str] = field(default_factory=dict)
    setup: Optional[List[str]] = None
    teardown: Optional[List[str]] = None
    srun_args: Optional[List[str]] = None
    use_srun: bool = True
    python: Optional[str] = None
    additional_parameters: Dict[str, Any] = field(default_factory=dict)
    wait_for_completion: bool = True


class SubmittedJob(JobReturn):
    """The result of a job that is not waited for: its status is UNKNOWN, and Hydra's sweeper accepts it."""

    @property
    def return_value(self) -> None:
        """Return None; `JobReturn` raises where the status is UNKNOWN."""


class DtslurmLauncher(BaseSubmititLauncher):
    """Runs every job of a multirun as a task of one array."""

    _EXECUTOR = "dtslurm"

    def __init__(self, *, wait_for_completion: bool = True, **params: Any) -> None:
        super().__init__(**params)
        self._waits = wait_for_completion

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the jobs and return their results, or results of status UNKNOWN without waiting for them."""
        from dtslurm.executor import DtslurmJob

        if self._waits:
            return super().launch(job_overrides, initial_job_idx)
        # The base class collects the results of all jobs before it returns, and has no option against that.
        with mock.patch.object(DtslurmJob, "results", return_value=[SubmittedJob()]):
            return super().launch(job_overrides, initial_job_idx)


ConfigStore.instance().store(
    group="hydra/launcher", name="dtslurm", node=DtslurmQueueConf(), provider="dtslurm"
)
