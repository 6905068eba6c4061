"""Wires profile, scheduler, transport and store together; nothing else does."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from dtslurm.config import profiles, project
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.cluster import ClusterProfile, Paths
from dtslurm.model.job import JobRecord
from dtslurm.model.project import Project
from dtslurm.scheduler.base import Scheduler
from dtslurm.store.index import Index, default_path
from dtslurm.transport.base import Transport
from dtslurm.transport.local import LocalTransport

_SLURM_CONFS = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/run/slurm/conf/slurm.conf",
)


@dataclass(frozen=True)
class Cluster:
    """A cluster in use: its profile, where its values came from, and how to reach its queue."""

    profile: ClusterProfile
    origins: Mapping[str, str]
    scheduler: Scheduler
    transport: Transport
    chosen_by: str
    path: Path

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.profile.name


@dataclass
class Context:
    """What every use-case needs: where the user stands, the environment, the clock."""

    cwd: Path = field(default_factory=Path.cwd)
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    _clusters: dict[str, Cluster] = field(default_factory=dict)

    @cached_property
    def project(self) -> Project:
        """The project's ``dtslurm.yaml``, empty if there is none."""
        return project.load(self.cwd)

    @cached_property
    def index(self) -> Index:
        """The user's index of runs; where there is none, made of the run directories in the usual place."""
        path = default_path(self.env)
        index = Index(path)
        if not path.exists():
            with contextlib.suppress(
                StoreError, RuntimeError
            ):  # it is only a convenience; no home to look in
                usual = self.env.get("DTSLURM_RUN_ROOT") or Paths().run_root
                index.rebuild([Path(usual).expanduser()])
        return index

    @cached_property
    def transport(self) -> Transport:
        """This machine."""
        return LocalTransport()

    def default_cluster(self) -> tuple[str, str]:
        """Return the name of the cluster to use when none is named, and why that one."""
        if name := self.env.get("DTSLURM_CLUSTER"):
            return name, "$DTSLURM_CLUSTER"
        if self.project.cluster:
            return self.project.cluster, str(self.project.path)
        sbatch = shutil.which("sbatch", path=self.env.get("PATH"))
        if sbatch is None:
            return "local", "no Slurm on this machine"
        if not self._slurm_is_configured(sbatch):
            return "local", f"{sbatch} is there, but no slurm.conf"
        return "slurm", "the Slurm on this machine"

    def _slurm_is_configured(self, sbatch: str) -> bool:
        """Tell whether Slurm's commands know a cluster, without asking it anything.

        A distribution's sbatch looks in /etc, and in /run where slurmd or sackd fetched the file; one
        installed elsewhere has its own idea of where, and is trusted.
        """
        if self.env.get("SLURM_CONF") or self.env.get("SLURM_CONF_SERVER"):
            return True
        return not sbatch.startswith(("/usr/bin/", "/bin/")) or any(map(os.path.exists, _SLURM_CONFS))

    def cluster(self, name: str | None = None) -> Cluster:
        """Return the cluster of that name, or the default one.

        Raises:
            ProfileNotFound: there is no such profile.
            ProfileInvalid: the profile is wrong.
            RequestInvalid: the cluster can only be reached over SSH.
        """
        chosen_by = "--cluster"
        if name is None:
            name, chosen_by = self.default_cluster()
        if name not in self._clusters:
            loaded = profiles.load(name, cwd=self.cwd, env=self.env)
            scheduler = self._scheduler(loaded.profile)
            self._clusters[name] = Cluster(
                loaded.profile, loaded.origins, scheduler, self.transport, chosen_by, loaded.path
            )
        return self._clusters[name]

    def cluster_of(self, record: JobRecord) -> Cluster:
        """Return the cluster that a run was queued on, also when its profile is not on today's search path.

        Raises:
            ProfileNotFound, ProfileInvalid: the profile is gone or wrong.
        """
        return self.cluster(record.profile if Path(record.profile).is_file() else record.cluster)

    def live_cluster(self, name: str | None = None) -> Cluster:
        """Return the cluster with its profile completed by what its scheduler says."""
        cluster = self.cluster(name)
        self._require_reachable(cluster.profile)
        return replace(cluster, profile=cluster.scheduler.profile(cluster.profile))

    def _scheduler(self, profile: ClusterProfile) -> Scheduler:
        if profile.scheduler == "local":
            from dtslurm.scheduler.local import LocalScheduler

            return LocalScheduler()
        from dtslurm.scheduler.slurm import SlurmScheduler

        return SlurmScheduler(self.transport)

    def _require_reachable(self, profile: ClusterProfile) -> None:
        if profile.scheduler == "local" or shutil.which("sbatch", path=self.env.get("PATH")):
            return
        if profile.login.host:
            raise RequestInvalid(
                [f"cluster {profile.name} is reached at {profile.login.host}, and there is no sbatch here"],
                hint="run dtslurm on its login node; submitting over SSH is not built yet",
            )
        raise RequestInvalid(
            [f"cluster {profile.name} needs Slurm, and there is no sbatch on this machine's PATH"],
            hint="use --cluster local to run on this machine, or run dtslurm on a login node",
        )
