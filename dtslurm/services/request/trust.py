"""What a project asks a user to trust: hosts, secrets, setup lines and templates that its files name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm import assets
from dtslurm.config import files, profiles, project, trust
from dtslurm.config.job_file_detection import is_job_file
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.shell import quote
from dtslurm.model.values import dataclass
from dtslurm.services.wiring.context import ActiveCluster, Context

if TYPE_CHECKING:  # a script alone needs no job files
    from dtslurm.config.jobs import LoadedJob


@dataclass(frozen=True)
class ProjectFile:
    """A file of a project.

    Attributes:
        says: what of it asks for trust.
        known: the user had trusted it before.
    """

    path: Path
    says: str
    known: bool


def untrusted(context: Context) -> list[str]:
    """Return a remark on what a project's file asks for and the user has not trusted, for who only looks.

    Raises:
        RequestInvalid: a job is to be submitted.
    """
    asks = context.project.untrusted
    if not asks:
        return []
    if context.dry_run:
        return [f"before you submit this: dtslurm trust, for {'; '.join(asks)}"]
    raise RequestInvalid([f"you have not trusted this: {ask}" for ask in asks], hint=trust.HINT)


def require_trust(context: Context, job: LoadedJob) -> None:
    """Let no job file that the user has not trusted name secrets, or take variables of the user's.

    Raises:
        RequestInvalid: a job is to be submitted by such a file.
    """
    if context.dry_run:
        return
    works = [stage.work for stage in job.stages]
    asks = [f"secret {name}" for work in works for name in work.secrets]
    asks += [f"your {name}" for work in works for name, value in work.env.items() if value is None]
    if not asks:
        return
    trusted = trust.trust_of(context.env)
    names = [str(path) for path in job.files if not trusted.has(path, files.read(path, str(path)))]
    if names:
        problem = f"you have not trusted {job.path.name}, which asks for {', '.join(dict.fromkeys(asks))}"
        raise RequestInvalid([problem], hint=f"{trust.HINT} {' '.join(map(quote, names))}")


def stands_in(context: Context, cluster: ActiveCluster | None) -> list[str]:
    """Return a remark on a project's profile that comes before another of the same name."""
    if cluster is None or not cluster.known.foreign:
        return []
    other = profiles.stood_in_for(cluster.name, cluster.path, cwd=context.cwd, env=context.env)
    return [f"{cluster.path} is used in place of {other}"] if other else []


def trust_files(context: Context, asked: Sequence[Path]) -> list[ProjectFile]:
    """Trust files as they are, or all of a project's that ask for it.

    Raises:
        RequestInvalid: a file is not there, or not readable.
        StoreError: this cannot be kept.
    """
    trusted = trust.trust_of(context.env)
    seen = []
    for path in [context.cwd / one for one in asked] or list(dict.fromkeys(_of_project(context))):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RequestInvalid([f"{path} cannot be read: {error.strerror or error}"]) from error
        says = _what_it_says(path)
        known = trusted.has(path, data)
        try:
            trusted.add(path, data)
            if path.name == project.FILE_NAME:
                found = project.load(path.parent, env=context.env)
                says = ", ".join(sorted({ask.rpartition(" ")[2] for ask in found.untrusted})) or says
                known = known and not found.untrusted
                trusted.add(path, project.what_needs_trust(found.options))
        except OSError as error:
            message = f"what you trust cannot be kept: {error.strerror or error}"
            raise StoreError(message, hint="set XDG_STATE_HOME to a folder that you may write to") from error
        seen.append(ProjectFile(path, says, known))
    return seen


def _of_project(context: Context) -> Iterator[Path]:
    """Yield the files of the project here that ask for trust."""
    folders = [context.cwd]
    found = project.find(context.cwd, env=context.env)
    if found is not None:
        yield found
        folders.append(found.parent)
        template = project.load(context.cwd, env=context.env).options.template
        if template:
            yield context.cwd / template
    for folder in folders:
        if folder / "cluster_profiles" != assets.cluster_profiles():
            yield from sorted((folder / "cluster_profiles").glob("[!.]*.y*ml"))
        if folder / "templates" != assets.templates():
            yield from sorted((folder / "templates").rglob("*.j2"))
            yield from sorted((folder / "templates" / "fabrics").glob("*.yaml"))


def _what_it_says(path: Path) -> str:
    if path.name == project.FILE_NAME:
        return "defaults"
    if path.suffix == ".j2":
        return "template"
    if is_job_file(path):
        return "job file"
    return "profile" if path.parent.name == "cluster_profiles" else "file"
