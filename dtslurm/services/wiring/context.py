"""The context of a command: the only module that connects profile, scheduler, transport and store."""

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
from dtslurm.model.paths import RUN_ROOT, expand_home, working_directory
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

if TYPE_CHECKING:  # not imported at run time: listing jobs needs none of them
    from tempfile import TemporaryDirectory

    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.project import Project
    from dtslurm.remote.remote_worker import RemoteWorker

OWN_SLURM_HINT = "add its ClusterName to recognise: in the profile, or use --transport local"


@dataclass(frozen=True)
class ActiveCluster:
    """A cluster in use: its profile, and how to reach its queue.

    Attributes:
        known: the profile, perhaps from the cache.
        scheduler: runs Slurm's commands, or processes on this machine.
        transport: runs commands on the login node, or on this machine.
        chosen_by: the option, variable or file that named the cluster.
        reached_by: why this transport was chosen, if the profile names a login node and leaves the choice
            open.
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
        """How the cluster is reached and queried; cheaper to read than the full profile."""
        return self.known.access

    @property
    def profile(self) -> ClusterProfile:
        """The full profile."""
        return self.known.profile

    @property
    def origins(self) -> Mapping[str, str]:
        """The file and line that each of the profile's values comes from."""
        return self.known.origins

    @property
    def path(self) -> Path:
        """The profile's file."""
        return self.known.path

    def with_profile(self, profile: ClusterProfile) -> ActiveCluster:
        """Return the same cluster with another profile in place of its own."""
        from dtslurm.config.profiles import LoadedProfile

        loaded_profile = LoadedProfile(
            profile=profile, path=self.path, origins=self.origins, foreign=self.known.foreign
        )
        return replace(self, known=loaded_profile)

    @property
    def automatic_transport(self) -> str:
        """The transport's name if the profile names a login node and leaves the choice open, else empty."""
        return self.transport.name if self.access.host and self.access.transport == "auto" else ""

    @property
    def remote(self) -> bool:
        """Whether the cluster's login node is another machine."""
        return not self.transport.local


def identify_slurm(env: Mapping[str, str], link: Transport, access: Access, path: Path) -> str:
    """Return a text that identifies one Slurm installation, as this user sees it."""
    parts = [link.host]
    if link.local:
        program = shutil.which("squeue", path=env.get("PATH")) or ""
        parts += [env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER") or program]
        parts += [env.get("SLURM_CLUSTERS", "")]
    else:
        parts += [access.user or "", str(path)]
    return "\n".join([*parts, str(os.geteuid())])


def _environment() -> dict[str, str]:
    """Return the environment; without HOME, as in cron and some containers, HOME is the account's."""
    env = dict(os.environ)
    if not env.get("HOME"):
        with contextlib.suppress(KeyError):  # not every user id has an account
            env["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    return env


@dataclass
class Context:
    """What every use case needs: the working directory, the environment, the clock, and the clusters in use.

    Attributes:
        cwd: the user's working directory.
        env: the environment.
        clock: returns seconds since the epoch.
        sleep: waits for a number of seconds.
        workers: the worker programs that receive submissions, by the transport to their login node.
        dry_run: nothing is submitted, and no program of the project may be started to check it: a dry run in
            another user's repository runs none of its programs.
        prompt: asks the user for a password or code: (text, echo) to answer; None without a terminal.
        queues: this process's last queue snapshot of each Slurm, used if the shared cache cannot be written.
        messages_checked_at: when messages of a run were last left to a sender by this process, by token.
        preflight_results: time and notices of each submission that passed the preflight in this process.
    """

    cwd: Path = field(default_factory=working_directory)
    env: Mapping[str, str] = field(default_factory=_environment)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    dry_run: bool = False
    prompt: Callable[[str, bool], str] | None = None
    queues: dict[str, SharedQueue] = field(default_factory=dict)
    workers: dict[Transport, RemoteWorker] = field(default_factory=dict, repr=False)
    messages_checked_at: dict[str, float] = field(default_factory=dict, repr=False)
    preflight_results: dict[str, tuple[float, list[str]]] = field(default_factory=dict, repr=False)
    _clusters: dict[tuple[str, str], ActiveCluster] = field(default_factory=dict)
    _scratch: TemporaryDirectory[str] | None = field(default=None, repr=False)

    @cached_property
    def project(self) -> Project:
        """The project's ``dtslurm.yaml``, empty if there is none."""
        from dtslurm.config import project

        return project.load(self.cwd, env=self.env)

    @cached_property
    def index(self) -> Index:
        """The user's index of runs; a missing index is rebuilt from the default run root.

        If the file cannot be written, as on a full or read-only home, this process uses a copy, which also
        gets the runs that the file lacks.
        """
        path = default_path(self.env)
        index = Index(path)
        must_rebuild = not (path.exists() and path.stat().st_size)  # a full disk leaves an empty file
        if explain_unwritable(path):
            import tempfile  # imported late: rarely needed

            with contextlib.suppress(OSError):
                self._scratch = tempfile.TemporaryDirectory(prefix="dtslurm-index-")
                index, must_rebuild = Index(Path(self._scratch.name) / path.name, permanent=False), True
                if path.is_file():
                    shutil.copyfile(path, Path(self._scratch.name) / path.name)
        with contextlib.suppress(StoreError):  # runs can also be found without the index
            run_root = expand_home(self.env.get("DTSLURM_RUN_ROOT") or RUN_ROOT, self.env.get("HOME", ""))
            if must_rebuild:
                index.rebuild([run_root])
            elif index.permanent:
                index.insert_missing(run_root)
        return index

    @cached_property
    def transport(self) -> Transport:
        """The transport to this machine."""
        return LocalTransport()

    def default_cluster(self) -> tuple[str, str]:
        """Return the name of the cluster to use if none is named, and the reason for it."""
        if name := self.env.get("DTSLURM_CLUSTER"):
            return name, "$DTSLURM_CLUSTER"
        if self.project.cluster:
            return self.project.cluster, str(self.project.path)
        sbatch = shutil.which("sbatch", path=self.env.get("PATH"))
        if sbatch is None:
            return "local", "no Slurm on this machine"
        if not is_configured(sbatch, self.env):
            return "local", f"{sbatch} exists, but there is no slurm.conf"
        return "slurm", "the Slurm on this machine"

    def cluster(self, name: str | None = None, transport: str | None = None) -> ActiveCluster:
        """Return the cluster of that name, or the default cluster.

        No command runs on the cluster.

        Args:
            name: the profile's name; None for the default cluster.
            transport: how to reach it; None for the profile's choice.

        Raises:
            ProfileNotFound: there is no such profile.
            ProfileInvalid: the profile is invalid.
            RequestInvalid: the cluster cannot be reached by that transport, or the user has not trusted a
                project's profile.
        """
        chosen_by = "--cluster"
        if name is None:
            name, chosen_by = self.default_cluster()
        key = (name, transport or "")
        if key not in self._clusters:
            known_profile = profile_cache.load(name, cwd=self.cwd, env=self.env)
            self._require_trust(known_profile)
            cluster_transport, reached_by = self._choose_transport(known_profile, transport)
            scheduler = self._make_scheduler(known_profile.access, cluster_transport, key, known_profile.path)
            self._clusters[key] = ActiveCluster(
                known_profile, scheduler, cluster_transport, chosen_by, reached_by
            )
        return self._clusters[key]

    def _require_trust(self, profile: KnownProfile) -> None:
        """Refuse a project's profile that the user has not trusted: it decides where code and logins go.

        A dry run may use an untrusted profile, unless dtslurm would log in to the host that the profile
        names.
        """
        if not profile.foreign or (self.dry_run and not profile.access.host):
            return
        from dtslurm.config import files, trust

        trust_store = trust.trust_of(self.env)
        untrusted_paths = [
            str(path) for path in profile.foreign if not trust_store.has(path, files.read(path, str(path)))
        ]
        if untrusted_paths:
            raise RequestInvalid(
                [f"you have not trusted this profile: {name}" for name in untrusted_paths],
                hint=f"a profile determines the destination of your jobs and logins; {trust.HINT} "
                f"{' '.join(map(quote, untrusted_paths))}",
            )

    def check_project(self, cluster: ActiveCluster | None) -> list[str]:
        """Return notices on settings that the user has not trusted, and on a profile that replaces another.

        Raises:
            RequestInvalid: this is no dry run, and the user has not trusted all of the project's settings.
        """
        from dtslurm.config import profiles, trust

        settings = self.project.untrusted
        if settings and not self.dry_run:
            problems = [f"you have not trusted this setting: {setting}" for setting in settings]
            raise RequestInvalid(problems, hint=trust.HINT)
        notices = []
        if settings:
            notices.append(f"run dtslurm trust before you submit this, because of {'; '.join(settings)}")
        if cluster is not None and cluster.known.foreign:
            replaced = profiles.find_replaced_profile(cluster.name, cluster.path, cwd=self.cwd, env=self.env)
            notices += [f"{cluster.path} is used in place of {replaced}"] if replaced else []
        return notices

    def cluster_without_profile(self, host: str | None, transport: str | None = None) -> ActiveCluster:
        """Return a cluster that has no profile: the Slurm on this machine, or the one behind a login node.

        Raises:
            RequestInvalid: there is no Slurm on this machine, or the host cannot be reached by that
                transport.
        """
        from dtslurm.config.profiles import LoadedProfile
        from dtslurm.model.cluster import ClusterProfile, Login

        profile = ClusterProfile(name=host or "slurm", login=Login(host=host))
        if host is None:
            self._require_slurm(profile.access)
        key = (f"\0{host or ''}", transport or "")
        if key not in self._clusters:
            cluster_transport: Transport = self.transport
            if host is not None:
                from dtslurm.transport.connect import connect

                cluster_transport = connect(host, transport=transport, env=self.env, prompt=self.prompt)
            chosen_by = "as requested" if host else "the Slurm on this machine"
            scheduler = self._make_scheduler(profile.access, cluster_transport, key, Path())
            loaded_profile = LoadedProfile(profile=profile, path=Path())
            self._clusters[key] = ActiveCluster(loaded_profile, scheduler, cluster_transport, chosen_by)
        return self._clusters[key]

    def completed(
        self, cluster: ActiveCluster, profile: ClusterProfile, transport: str | None = None
    ) -> ActiveCluster:
        """Use ``profile``, completed from the cluster's answers, as the cluster's profile from now on."""
        self._clusters[cluster.name, transport or ""] = cluster.with_profile(profile)
        return self._clusters[cluster.name, transport or ""]

    def _choose_transport(self, profile: KnownProfile, transport_name: str | None) -> tuple[Transport, str]:
        """Return the transport to a cluster, and the reason for it.

        The Slurm on this machine is used if it is the cluster's own, else SSH to the login node.
        """
        access = profile.access
        is_local = access.scheduler == "local"
        name = transport_name or (access.transport if not is_local else "auto")
        if name == "local" or (name == "auto" and (is_local or not access.host)):
            return self.transport, ""
        if is_local or not access.host:
            reason = "its scheduler is local" if access.host else "its profile has no login.host"
            raise RequestInvalid([f"cluster {access.name} cannot be reached with transport {name}: {reason}"])
        from dtslurm.transport.connect import connect, real_name

        is_ambiguous = name == "auto" and self.has_slurm()
        hint = f"if this machine's Slurm is {access.name}'s: {OWN_SLURM_HINT}" if is_ambiguous else ""
        ssh_transport = connect(
            access.host, user=access.user, transport=name, env=self.env, prompt=self.prompt, hint=hint
        )
        if not is_ambiguous:
            return ssh_transport, ""
        from dtslurm.services.wiring.local_cluster_match import match_reason

        reason = match_reason(access, profile.origins, self.env, lambda: real_name(ssh_transport))
        return (
            (self.transport, reason)
            if reason
            else (ssh_transport, "this machine's Slurm was not recognized as the cluster's Slurm")
        )

    def has_slurm(self) -> bool:
        """Return whether this machine has a Slurm that is configured."""
        sbatch = shutil.which("sbatch", path=self.env.get("PATH"))
        return sbatch is not None and is_configured(sbatch, self.env)

    def cluster_of(self, record: JobRecord) -> ActiveCluster:
        """Return the cluster that a run was submitted to, even if its profile left the search path.

        The transport is the same as at submission, because the job is in no other queue. A run without a
        mirror is on this machine, and so is its Slurm.

        Raises:
            ProfileNotFound, ProfileInvalid: the profile is gone or invalid.
        """
        path = Path(record.profile)
        name = str(assets.packaged_here(path)) if path.is_file() else record.cluster
        is_remote = bool(record.mirror)
        transport = record.transport if is_remote or record.transport == "local" else ""
        cluster = self.cluster(name, transport or None)
        if cluster.remote == is_remote or not cluster.access.host:
            return cluster
        from dtslurm.transport.connect import choose

        return self.cluster(name, choose(None, self.env)[0] if is_remote else "local")

    def live_cluster(self, name: str | None = None, transport: str | None = None) -> ActiveCluster:
        """Return the cluster with its profile completed by its scheduler's answers."""
        cluster = self.cluster(name, transport)
        if not cluster.remote:
            self._require_slurm(cluster.access)
        return cluster.with_profile(cluster.scheduler.profile(cluster.profile))

    def _make_scheduler(
        self, access: Access, transport: Transport, key: tuple[str, str], path: Path
    ) -> Scheduler:
        if access.scheduler == "local":
            from dtslurm.scheduler.local import LocalScheduler

            return LocalScheduler()
        from dtslurm.scheduler.slurm import SlurmScheduler

        return SlurmScheduler(
            transport,
            clock=self.clock,
            uid=None if transport.local else lambda: self._remote_uid(self._clusters[key]),
            shared_cache=BlobCache(cache_folder(self.env) / "slurm"),
            scope=identify_slurm(self.env, transport, access, path),
        )

    def _remote_uid(self, cluster: ActiveCluster) -> int | None:
        """Return the user's numeric id on a cluster, which is cached for a day."""
        from dtslurm.services.wiring.login_node import query_login_node

        return query_login_node(self, cluster).uid

    def _require_slurm(self, access: Access) -> None:
        if access.scheduler == "local" or shutil.which("sbatch", path=self.env.get("PATH")):
            return
        raise RequestInvalid(
            [f"cluster {access.name} needs Slurm, and there is no sbatch on this machine's PATH"],
            hint="use --cluster local to run on this machine, or give the profile a login.host for SSH",
        )
