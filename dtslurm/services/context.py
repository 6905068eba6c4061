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

    @property
    def remote(self) -> bool:
        """Whether its login node is another machine."""
        return not self.transport.local


@dataclass
class Context:
    """What every use-case needs: where the user stands, the environment, the clock.

    Attributes:
        prompt: asks the user for a password or code: (text, echo) to answer; None where nobody can be asked.
    """

    cwd: Path = field(default_factory=Path.cwd)
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    prompt: Callable[[str, bool], str] | None = None
    _clusters: dict[tuple[str, str], Cluster] = field(default_factory=dict)

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

    def cluster(self, name: str | None = None, transport: str | None = None) -> Cluster:
        """Return the cluster of that name, or the default one, reached as its profile or ``transport`` says.

        Nothing is asked of the cluster.

        Raises:
            ProfileNotFound: there is no such profile.
            ProfileInvalid: the profile is wrong.
            RequestInvalid: it cannot be reached that way.
        """
        chosen_by = "--cluster"
        if name is None:
            name, chosen_by = self.default_cluster()
        key = (name, transport or "")
        if key not in self._clusters:
            loaded = profiles.load(name, cwd=self.cwd, env=self.env)
            link = self._link(loaded.profile, transport)
            self._clusters[key] = Cluster(
                loaded.profile,
                loaded.origins,
                self._scheduler(loaded.profile, link, key),
                link,
                chosen_by,
                loaded.path,
            )
        return self._clusters[key]

    def _link(self, profile: ClusterProfile, wanted: str | None) -> Transport:
        """Return how a cluster is reached: from here where its Slurm is, else over SSH."""
        login = profile.login
        wanted = wanted or (login.transport if login.transport != "auto" else None)
        if profile.scheduler == "local" or wanted == "local":
            return self.transport
        if wanted is None and (not login.host or self._has_slurm()):
            return self.transport
        if not login.host:
            raise RequestInvalid(
                [f"cluster {profile.name} cannot be reached by {wanted}: its profile names no login.host"]
            )
        from dtslurm.transport.connect import connect

        return connect(login.host, user=login.user, transport=wanted, env=self.env, prompt=self.prompt)

    def _has_slurm(self) -> bool:
        sbatch = shutil.which("sbatch", path=self.env.get("PATH"))
        return sbatch is not None and self._slurm_is_configured(sbatch)

    def cluster_of(self, record: JobRecord) -> Cluster:
        """Return the cluster that a run was queued on, also when its profile is not on today's search path.

        Raises:
            ProfileNotFound, ProfileInvalid: the profile is gone or wrong.
        """
        name = record.profile if Path(record.profile).is_file() else record.cluster
        return self.cluster(name, record.transport or None)

    def live_cluster(self, name: str | None = None, transport: str | None = None) -> Cluster:
        """Return the cluster with its profile completed by what its scheduler says."""
        cluster = self.cluster(name, transport)
        if not cluster.remote:
            self._require_slurm(cluster.profile)
        return replace(cluster, profile=cluster.scheduler.profile(cluster.profile))

    def _scheduler(self, profile: ClusterProfile, link: Transport, key: tuple[str, str]) -> Scheduler:
        if profile.scheduler == "local":
            from dtslurm.scheduler.local import LocalScheduler

            return LocalScheduler()
        from dtslurm.scheduler.slurm import SlurmScheduler

        if link.local:
            return SlurmScheduler(link)
        return SlurmScheduler(link, uid=lambda: self._uid(self._clusters[key]))

    def _uid(self, cluster: Cluster) -> int | None:
        """Return the user's number on a cluster, which is remembered for a day."""
        from dtslurm.services.site import site_of

        return site_of(self, cluster).uid

    def _require_slurm(self, profile: ClusterProfile) -> None:
        if profile.scheduler == "local" or shutil.which("sbatch", path=self.env.get("PATH")):
            return
        raise RequestInvalid(
            [f"cluster {profile.name} needs Slurm, and there is no sbatch on this machine's PATH"],
            hint="use --cluster local to run on this machine, or give the profile a login.host for SSH",
        )
