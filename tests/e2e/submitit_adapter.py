"""A plugin of pytest's that puts dtslurm's executor in the place of submitit's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from submitit.core import plugins
from submitit.local import local
from submitit.slurm import slurm

from dtslurm.executor import DtslurmExecutor, DtslurmJob

PROFILE = "DTSLURM_PROFILE_OF_SUITE"


class Executor(DtslurmExecutor):
    """dtslurm's executor, made as submitit's are."""

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(
            folder,
            profile=os.environ[PROFILE],
            max_num_timeout=max_num_timeout,
            max_pickle_size_gb=max_pickle_size_gb,
            python=python,
        )


class LocalExecutor(Executor):
    """In the place of submitit's of that name."""

    @classmethod
    def name(cls) -> str:
        """As the original's."""
        return "local"


class SlurmExecutor(Executor):
    """In the place of submitit's of that name."""

    @classmethod
    def name(cls) -> str:
        """As the original's."""
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """As the original's, where there is a Slurm."""
        return 2


def pytest_configure(config: pytest.Config) -> None:
    """Replace the executors before any test imports them."""
    del config
    setattr(local, "LocalExecutor", LocalExecutor)  # noqa: B010
    setattr(local, "LocalJob", DtslurmJob)  # noqa: B010
    setattr(slurm, "SlurmExecutor", SlurmExecutor)  # noqa: B010
    setattr(slurm, "SlurmJob", DtslurmJob)  # noqa: B010
    plugins._get_plugins.cache_clear()
    plugins.get_executors.cache_clear()
