"""Wires profile, scheduler, transport and store together; nothing else does."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm import assets
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.access import Access
from dtslurm.model.paths import expanded, here
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.shell import quote
from dtslurm.model.values import dataclass
from dtslurm.scheduler.base import Scheduler
from dtslurm.services.wiring import profile_cache
from dtslurm.services.wiring.profile_cache import KnownProfile
from dtslurm.services.wiring.slurm_conf import is_configured
from dtslurm.store.blob_cache import BlobCache
from dtslurm.store.index import Index, cache_folder, default_path, explain_unwritable
from dtslurm.store.queue_cache import SharedQueue
from dtslurm.transport.base import Transport
from dtslurm.transport.local import LocalTransport

if TYPE_CHECKING:  # a look at one's jobs needs none of them
    from tempfile import TemporaryDirectory

    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.project import Project
    from dtslurm.remote.remote_worker import RemoteWorker

IF_IT_IS_ITS_OWN = "name its ClusterName in the profile's recognise, or use --transport local"


@dataclass(frozen=True)
class ActiveCluster:
    """A cluster in use: what is known of it, and how to reach its queue.

    Attributes:
        reached_by: why it is reached this way, where its profile names a login node and that left a choice.
    """

    known: KnownProfile
    scheduler: Scheduler
    transport: Transport
    chosen_by: str
    reached_by: str = ""

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.known.access.name

    @property
    def access(self) -> Access:
        """How it is reached and asked, which costs less than the whole profile."""
        return self.known.access

    @property
    def profile(self) -> ClusterProfile:
        """The profile."""
        return self.known.profile

    @property
    def origins(self) -> Mapping[str, str]:
        """Where the profile's values came from."""
        return self.known.origins

    @property
    def path(self) -> Path:
        """The profile's file."""
        return self.known.path

    def with_profile(self, profile: ClusterProfile) -> ActiveCluster:
        """Return the same cluster with another profile in place of its own."""
        from dtslurm.config.profiles import LoadedProfile

        known = LoadedProfile(
            profile=profile, path=self.path, origins=self.origins, foreign=self.known.foreign
        )
        return replace(self, known=known)

    @property
    def way(self) -> str:
        """The transport in use where the profile names a login node and leaves this open, else empty."""
        return self.transport.name if self.access.host and self.access.transport == "auto" else ""

    @property
    def remote(self) -> bool:
        """Whether its login node is another machine."""
        return not self.transport.local


def slurm_place(env: Mapping[str, str], link: Transport, access: Access, path: Path) -> str:
    """Return a word that tells one Slurm, as this user sees it, from all others."""
    place = [link.host]
    if link.local:
        program = shutil.which("squeue", path=env.get("PATH")) or ""
        place += [env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER") or program]
        place += [env.get("SLURM_CLUSTERS", "")]
    else:
        place += [access.user or "", str(path)]
    return "\n".join([*place, str(os.geteuid())])


def _environment() -> dict[str, str]:
    """Return the environment; where it has no HOME, as in cron and some containers, the account's."""
    env = dict(os.environ)
    if not env.get("HOME"):
        with contextlib.suppress(KeyError):  # nor has every number an account
            env["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    return env


@dataclass
class Context:
    """What every use-case needs: where the user stands, the environment, the clock.

    Attributes:
        workers: what takes submissions in on the far side, by the way to it.
        dry_run: nothing is submitted, so that nothing of the project may be started to check it: a look at
            somebody else's repository runs none of its programs.
        prompt: asks the user for a password or code: (text, echo) to answer; None where nobody can be asked.
        queues: what this process heard last of each Slurm, for where it cannot be shared with others.
        passed: what was looked over before it was queued and found good: when, and what was noticed.
    """

    cwd: Path = field(default_factory=here)
    env: Mapping[str, str] = field(default_factory=_environment)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    dry_run: bool = False
    prompt: Callable[[str, bool], str] | None = None
    queues: dict[str, SharedQueue] = field(default_factory=dict)
    workers: dict[Transport, RemoteWorker] = field(default_factory=dict, repr=False)
    passed: dict[str, tuple[float, list[str]]] = field(default_factory=dict, repr=False)
    _clusters: dict[tuple[str, str], ActiveCluster] = field(default_factory=dict)
    _scratch: TemporaryDirectory[str] | None = field(default=None, repr=False)

    @cached_property
    def project(self) -> Project:
        """The project's ``dtslurm.yaml``, empty if there is none."""
        from dtslurm.config import project

        return project.load(self.cwd, env=self.env)

    @cached_property
    def index(self) -> Index:
        """The user's index of runs; where there is none, made of the run directories in the usual place.

        Where the file cannot be written, as on a full or read-only home, a copy serves this process, with the
        runs that the file does not know.
        """
        path = default_path(self.env)
        index = Index(path)
        rebuilds = not (path.exists() and path.stat().st_size)  # a full disk leaves an empty file
        if explain_unwritable(path):
            import tempfile  # rarely needed

            with contextlib.suppress(OSError):
                self._scratch = tempfile.TemporaryDirectory(prefix="dtslurm-index-")
                index, rebuilds = Index(Path(self._scratch.name) / path.name), True
                if path.is_file():
                    shutil.copyfile(path, Path(self._scratch.name) / path.name)
        if rebuilds:
            with contextlib.suppress(StoreError):  # it is only a convenience
                from dtslurm.model.cluster import Paths

                usual = self.env.get("DTSLURM_RUN_ROOT") or Paths().run_root
                index.rebuild([expanded(usual, self.env.get("HOME", ""))])
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
        if not is_configured(sbatch, self.env):
            return "local", f"{sbatch} is there, but no slurm.conf"
        return "slurm", "the Slurm on this machine"

    def cluster(self, name: str | None = None, transport: str | None = None) -> ActiveCluster:
        """Return the cluster of that name, or the default one, reached as its profile or ``transport`` says.

        Nothing is asked of the cluster.

        Raises:
            ProfileNotFound: there is no such profile.
            ProfileInvalid: the profile is wrong.
            RequestInvalid: it cannot be reached that way, or the user has not trusted a project's profile.
        """
        chosen_by = "--cluster"
        if name is None:
            name, chosen_by = self.default_cluster()
        key = (name, transport or "")
        if key not in self._clusters:
            known = profile_cache.load(name, cwd=self.cwd, env=self.env)
            self._require_trust(known)
            link, why = self._link(known, transport)
            scheduler = self._scheduler(known.access, link, key, known.path)
            self._clusters[key] = ActiveCluster(known, scheduler, link, chosen_by, why)
        return self._clusters[key]

    def _require_trust(self, known: KnownProfile) -> None:
        """Refuse a project's profile that the user has not trusted: it says where code and logins go.

        A dry run may use one, unless it would log in to the host that the profile names.
        """
        if not known.foreign or (self.dry_run and not known.access.host):
            return
        from dtslurm.config import files, trust

        trusted = trust.trust_of(self.env)
        names = [str(path) for path in known.foreign if not trusted.has(path, files.read(path, str(path)))]
        if names:
            raise RequestInvalid(
                [f"you have not trusted this profile: {name}" for name in names],
                hint=f"it says where your jobs and logins go; {trust.HINT} {' '.join(map(quote, names))}",
            )

    def cluster_without_profile(self, host: str | None, transport: str | None = None) -> ActiveCluster:
        """Return a cluster that no profile tells of: the Slurm on this machine, or behind a login node.

        Raises:
            RequestInvalid: there is no Slurm on this machine, or the host cannot be reached that way.
        """
        from dtslurm.config.profiles import LoadedProfile
        from dtslurm.model.cluster import ClusterProfile, Login

        profile = ClusterProfile(name=host or "slurm", login=Login(host=host))
        if host is None:
            self._require_slurm(profile.access)
        key = (f"\0{host or ''}", transport or "")
        if key not in self._clusters:
            link: Transport = self.transport
            if host is not None:
                from dtslurm.transport.connect import connect

                link = connect(host, transport=transport, env=self.env, prompt=self.prompt)
            chosen = "as asked" if host else "the Slurm on this machine"
            scheduler = self._scheduler(profile.access, link, key, Path())
            known = LoadedProfile(profile=profile, path=Path())
            self._clusters[key] = ActiveCluster(known, scheduler, link, chosen)
        return self._clusters[key]

    def completed(
        self, cluster: ActiveCluster, profile: ClusterProfile, transport: str | None = None
    ) -> ActiveCluster:
        """Use from now on a profile that the cluster's answers have completed: they are asked once."""
        self._clusters[cluster.name, transport or ""] = cluster.with_profile(profile)
        return self._clusters[cluster.name, transport or ""]

    def _link(self, known: KnownProfile, asked: str | None) -> tuple[Transport, str]:
        """Return how a cluster is reached, from here where its Slurm is, else over SSH; and why so."""
        access = known.access
        alone = access.scheduler == "local"
        wanted = asked or (access.transport if not alone else "auto")
        if wanted == "local" or (wanted == "auto" and (alone or not access.host)):
            return self.transport, ""
        if alone or not access.host:
            why = "its scheduler is local" if access.host else "its profile names no login.host"
            raise RequestInvalid([f"cluster {access.name} cannot be reached by {wanted}: {why}"])
        from dtslurm.transport.connect import connect, real_name

        choice = wanted == "auto" and self._has_slurm()
        hint = f"if this machine's Slurm is {access.name}'s: {IF_IT_IS_ITS_OWN}" if choice else ""
        link = connect(
            access.host, user=access.user, transport=wanted, env=self.env, prompt=self.prompt, hint=hint
        )
        if not choice:
            return link, ""
        from dtslurm.services.wiring.local_cluster_match import match_reason

        why = match_reason(access, known.origins, self.env, lambda: real_name(link))
        return (self.transport, why) if why else (link, "nothing tells that this machine's Slurm is its own")

    def _has_slurm(self) -> bool:
        sbatch = shutil.which("sbatch", path=self.env.get("PATH"))
        return sbatch is not None and is_configured(sbatch, self.env)

    def cluster_of(self, record: JobRecord) -> ActiveCluster:
        """Return the cluster that a run was queued on, also when its profile is not on today's search path.

        It is reached as it was then: the job is in no other queue. A run without a mirror lies on this
        machine, and so does its Slurm.

        Raises:
            ProfileNotFound, ProfileInvalid: the profile is gone or wrong.
        """
        path = Path(record.profile)
        name = str(assets.packaged_here(path)) if path.is_file() else record.cluster
        far = bool(record.mirror)
        way = record.transport if far or record.transport == "local" else ""
        cluster = self.cluster(name, way or None)
        if cluster.remote == far or not cluster.access.host:
            return cluster
        from dtslurm.transport.connect import choose

        return self.cluster(name, choose(None, self.env)[0] if far else "local")

    def live_cluster(self, name: str | None = None, transport: str | None = None) -> ActiveCluster:
        """Return the cluster with its profile completed by what its scheduler says."""
        cluster = self.cluster(name, transport)
        if not cluster.remote:
            self._require_slurm(cluster.access)
        return cluster.with_profile(cluster.scheduler.profile(cluster.profile))

    def _scheduler(self, access: Access, link: Transport, key: tuple[str, str], path: Path) -> Scheduler:
        if access.scheduler == "local":
            from dtslurm.scheduler.local import LocalScheduler

            return LocalScheduler()
        from dtslurm.scheduler.slurm import SlurmScheduler

        return SlurmScheduler(
            link,
            clock=self.clock,
            uid=None if link.local else lambda: self._uid(self._clusters[key]),
            keeper=BlobCache(cache_folder(self.env) / "slurm"),
            place=slurm_place(self.env, link, access, path),
        )

    def _uid(self, cluster: ActiveCluster) -> int | None:
        """Return the user's number on a cluster, which is remembered for a day."""
        from dtslurm.services.wiring.login_node import site_of

        return site_of(self, cluster).uid

    def _require_slurm(self, access: Access) -> None:
        if access.scheduler == "local" or shutil.which("sbatch", path=self.env.get("PATH")):
            return
        raise RequestInvalid(
            [f"cluster {access.name} needs Slurm, and there is no sbatch on this machine's PATH"],
            hint="use --cluster local to run on this machine, or give the profile a login.host for SSH",
        )
