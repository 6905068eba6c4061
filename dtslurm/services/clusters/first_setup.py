"""The first setup of a folder: what its cluster offers, and the files that state the user's answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, profiles, project
from dtslurm.discover import page
from dtslurm.discover.facts import DiscoveredCluster, Fact
from dtslurm.errors import RequestInvalid
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import split_names
from dtslurm.model.paths import RUN_ROOT
from dtslurm.model.values import dataclass
from dtslurm.services.clusters import profile_file
from dtslurm.services.clusters.discover import Discovery
from dtslurm.services.wiring.context import Context

_EVIDENCE = "stated in dtslurm init"


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a cluster offers, and the values to use if the user states none.

    Attributes:
        partitions, accounts: the names that the cluster accepts; empty if they are unknown.
        partition, account: the default names, empty for the scheduler's own choice.
        run_root: the default run root.
    """

    partitions: tuple[str, ...] = ()
    partition: str = ""
    accounts: tuple[str, ...] = ()
    account: str = ""
    run_root: str = RUN_ROOT


def find_offers(context: Context, discovery: Discovery) -> Offers:
    """Return what a cluster offers, by Slurm's answers and the profile that describes it so far."""
    survey, found = discovery.survey, discovery.found
    described = _load_described(context, discovery)
    accounts = tuple(dict.fromkeys(association.account for association in survey.associations))
    return Offers(
        partitions=tuple(partition.name for partition in survey.partitions),
        partition=described.slurm.partition or found.text_of("slurm.partition"),
        accounts=accounts,
        account=described.slurm.account or found.text_of("slurm.account"),
        run_root=described.paths.run_root or RUN_ROOT,
    )


def _load_described(context: Context, discovery: Discovery) -> ClusterProfile:
    """Return the user's own profile, or the packaged one that a new profile extends, or an empty one."""
    path = find_profile_path(context, discovery.name)
    if not path.exists():
        if discovery.extends is None:
            return ClusterProfile(name=discovery.name)
        path = assets.cluster_profiles() / f"{discovery.extends}.yaml"
    return profiles.load(str(path), cwd=context.cwd, env=context.env).profile


def find_profile_path(context: Context, name: str) -> Path:
    """Return the file of the user's own profile with this name, which no project's trust is needed for.

    Raises:
        RequestInvalid: the user has no home folder.
    """
    folder = files.user_folder(context.env)
    if folder is None:
        raise RequestInvalid(["there is no folder for your profiles"], hint="set HOME or XDG_CONFIG_HOME")
    return folder / "cluster_profiles" / f"{name}.yaml"


def require_same_login_node(context: Context, discovery: Discovery, host: str | None) -> None:
    """Refuse to change the profile of another cluster with the same name: many are called ``cluster``.

    Raises:
        RequestInvalid: the user's profile exists and names another login node.
    """
    path = find_profile_path(context, discovery.name)
    known_host = _load_described(context, discovery).login.host if path.exists() else None
    if host and known_host and known_host != host:
        raise RequestInvalid(
            [f"{path} describes the cluster of the login node {known_host}"],
            hint=f"write a profile with another name: dtslurm cluster discover {host} -o "
            f"{path.with_name('NAME.yaml')}",
        )


def state_run_root(context: Context, discovery: Discovery, offers: Offers, run_root: str) -> Discovery:
    """Return a discovery whose profile has the run root that the user stated.

    Raises:
        RequestInvalid: the user's profile exists and names another run root.
    """
    if run_root == offers.run_root:
        return discovery
    path = find_profile_path(context, discovery.name)
    if path.exists() and offers.run_root != RUN_ROOT:
        raise RequestInvalid(
            [f"{path} has another run root, {offers.run_root}"],
            hint="edit paths.run_root in this file, or accept its value",
        )
    stated = DiscoveredCluster((Fact(("paths", "run_root"), run_root, _EVIDENCE),))
    text = profile_file.amend_profile(discovery.text, stated, discovery.name).text
    return replace(discovery, found=discovery.found + stated, text=text)


def find_run_root_problem(text: str) -> str:
    """Return why a text cannot be a run root, empty if it can."""
    is_absolute = text.startswith(("/", "~", "$"))
    return "" if is_absolute else f"{text!r} is relative; write /FOLDER, ~/FOLDER or $VARIABLE/FOLDER"


def require_no_project(context: Context) -> None:
    """Refuse a folder that has a project file already.

    Raises:
        RequestInvalid: a project file applies to the working directory.
    """
    path = project.find(context.cwd, env=context.env)
    if path is not None:
        raise RequestInvalid(
            [f"{path} exists already"],
            hint="edit this file, or run dtslurm init in another folder; dtslurm cluster discover writes or "
            "updates a profile alone",
        )


def save_project(context: Context, cluster_name: str, account: str = "", partition: str = "") -> Path:
    """Write the working directory's project file, and return its path.

    Raises:
        StoreError: the file cannot be written.
    """
    lines = [f"cluster: {page.scalar(cluster_name)}"]
    defaults = [(key, value) for key, value in (("account", account), ("partition", partition)) if value]
    if defaults:
        lines += ["defaults:", *(f"  {key}: {page.scalar(value)}" for key, value in defaults)]
    path = context.cwd / project.FILE_NAME
    context.transport.put("\n".join([*lines, ""]).encode(), str(path), mode=0o644)
    project.load(context.cwd, env=context.env)
    return path


def choose_first_layout(discovery: Discovery, partition: str) -> list[str]:
    """Return the options of a small job: two nodes of a partition if it has them, with a GPU each."""
    names = split_names(partition or discovery.found.text_of("slurm.partition"))
    kinds = [kind for kind in discovery.kinds if not names or set(names) & set(kind.partitions)]
    usable = [(kind, len(kind.usable)) for kind in kinds if kind.usable]
    if not usable:
        return ["-N", "1"]
    kind, count = max(usable, key=lambda entry: min(entry[1], 2))
    gpus = ["--gpus-per-node", "1"] if kind.node_type.gpus else []
    return ["-N", str(min(count, 2)), *gpus]


def write_first_script(folder: Path) -> str:
    """Write the script of the first job into a folder, and return its name."""
    source = assets.worker("hello.py")
    (folder / source.name).write_bytes(source.read_bytes())
    return source.name
