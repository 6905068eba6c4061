"""What a project's files need the user's trust for: hosts, secrets, setup lines and templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm import assets
from dtslurm.config import files, project, trust
from dtslurm.config.job_files.detection import is_job_file
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.shell import quote
from dtslurm.model.values import dataclass
from dtslurm.services.wiring.context import Context

if TYPE_CHECKING:  # not imported at run time: a script alone needs no job files
    from dtslurm.config.job_files.jobs import LoadedJob


@dataclass(frozen=True)
class ProjectFile:
    """A file of a project.

    Attributes:
        path: the file.
        says: the settings in it that need trust.
        known: the user had trusted the file before.
    """

    path: Path
    says: str
    known: bool


def require_trust(context: Context, job: LoadedJob) -> None:
    """Refuse an untrusted job file that names secrets or addresses, or copies variables of the user.

    Raises:
        RequestInvalid: a job is to be submitted from such a file.
    """
    if context.dry_run:
        return
    stage_options = [stage.work for stage in job.stages]
    settings = [f"secret {name}" for options in stage_options for name in options.secrets]
    settings += [f"notify {name}" for options in stage_options for name in options.notify]
    settings += [
        f"your {name}" for options in stage_options for name, value in options.env.items() if value is None
    ]
    if not settings:
        return
    trust_store = trust.trust_of(context.env)
    untrusted_files = [
        str(path) for path in job.files if not trust_store.has(path, files.read(path, str(path)))
    ]
    if untrusted_files:
        problem = f"you have not trusted {job.path.name}, which sets {', '.join(dict.fromkeys(settings))}"
        raise RequestInvalid([problem], hint=f"{trust.HINT} {' '.join(map(quote, untrusted_files))}")


def trust_files(context: Context, requested_paths: Sequence[Path]) -> list[ProjectFile]:
    """Trust the given files with their present content, or all files of the project that need trust.

    Raises:
        RequestInvalid: a file is missing or cannot be read.
        StoreError: the record of trust cannot be written.
    """
    trust_store = trust.trust_of(context.env)
    trusted_files = []
    for path in [context.cwd / name for name in requested_paths] or list(
        dict.fromkeys(_find_project_files(context))
    ):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RequestInvalid([f"{path} cannot be read: {error.strerror or error}"]) from error
        settings = _describe_file(path)
        was_trusted = trust_store.has(path, data)
        try:
            trust_store.add(path, data)
            if path.name == project.FILE_NAME:
                project_file = project.load(path.parent, env=context.env)
                settings = (
                    ", ".join(sorted({setting.rpartition(" ")[2] for setting in project_file.untrusted}))
                    or settings
                )
                was_trusted = was_trusted and not project_file.untrusted
                trust_store.add(path, project.encode_trusted_defaults(project_file.options))
        except OSError as error:
            message = f"cannot write the list of trusted files: {error.strerror or error}"
            raise StoreError(message, hint="set XDG_STATE_HOME to a folder that you can write to") from error
        trusted_files.append(ProjectFile(path, settings, was_trusted))
    return trusted_files


def _find_project_files(context: Context) -> Iterator[Path]:
    """Yield the files of the project in the working directory that need trust."""
    folders = [context.cwd]
    project_file = project.find(context.cwd, env=context.env)
    if project_file is not None:
        yield project_file
        folders.append(project_file.parent)
        template = project.load(context.cwd, env=context.env).options.template
        if template:
            yield context.cwd / template
    for folder in folders:
        if folder / "cluster_profiles" != assets.cluster_profiles():
            yield from sorted((folder / "cluster_profiles").glob("[!.]*.y*ml"))
        if folder / "templates" != assets.templates():
            yield from sorted((folder / "templates").rglob("*.j2"))
            yield from sorted((folder / "templates" / "fabrics").glob("*.yaml"))


def _describe_file(path: Path) -> str:
    if path.name == project.FILE_NAME:
        return "defaults"
    if path.suffix == ".j2":
        return "template"
    if is_job_file(path):
        return "job file"
    return "profile" if path.parent.name == "cluster_profiles" else "file"
