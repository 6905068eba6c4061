"""The paths of a run's files, and the folders that are searched for templates."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files
from dtslurm.config.trust import trust_of
from dtslurm.errors import RequestInvalid
from dtslurm.model.shell import RawShell, in_double_quotes
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace
from dtslurm.services.request.request import COMMAND_LINE, JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import query_login_node, variables_in
from dtslurm.store.blob_cache import BlobCache
from dtslurm.store.index import cache_folder


def templates_of(context: Context, request: JobRequest) -> Templates:
    """Return the template folders: the requested template's, the project's, the user's, the packaged.

    The user must have trusted the project's templates, except one that the command line names. A dry run also
    renders untrusted templates, because a template can only print text.
    """
    user_folder = files.user_folder(context.env)
    project = context.cwd / "templates"
    template_folder = (context.cwd / request.template).parent if request.template else None
    is_from_file = request.origins.get("template", COMMAND_LINE) != COMMAND_LINE
    untrusted_folders = (project, *([template_folder] if template_folder and is_from_file else []))
    return Templates(
        folders=tuple(
            filter(
                None,
                (
                    template_folder,
                    project,
                    user_folder / "templates" if user_folder else None,
                    assets.templates(),
                ),
            )
        ),
        keeper=BlobCache(cache_folder(context.env) / "templates"),
        foreign=() if context.dry_run else untrusted_folders,
        trust=trust_of(context.env),
    )


def choose_run_place(
    context: Context, cluster: ActiveCluster, request: JobRequest, name: str, *, standalone: bool
) -> RunPlace:
    """Return the run directory: a new folder, or for plain sbatch a folder named after the job id.

    Args:
        context: the working directory, the environment and the clock.
        cluster: where the job will run.
        request: may name the run root and an idempotency key.
        name: the job's name.
        standalone: the script is for plain sbatch.

    Raises:
        RequestInvalid: the run root cannot be used.
        TransportError: the run root depends on the login node, which cannot be reached.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "run"
    token = secrets.token_hex(6)
    if standalone:
        root = _unexpanded_root(context, cluster, request)
        job_id = "$SLURM_ARRAY_JOB_ID" if request.array else "$SLURM_JOB_ID"
        return RunPlace(
            RawShell(f'"{in_double_quotes(_root_for_shell(root, context))}/{slug}-{job_id}"'), None, token
        )
    root = run_root(context, cluster, request)
    if request.once:
        # The folder depends on the key alone, so the first process that creates it submits the job.
        directory = f"{root}/once-{_short_digest(request.once)}"
        token = _short_digest(f"{cluster.name}\0{root}\0{request.once}")
    else:
        stamp = datetime.fromtimestamp(context.clock()).strftime("%Y%m%d-%H%M%S")
        directory = f"{root}/{slug}-{stamp}-{token}"
    log = "batch-%a.log" if request.array else "batch.log"
    return RunPlace(directory, f"{directory}/logs/{log}", token)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def run_root(context: Context, cluster: ActiveCluster, request: JobRequest | None = None) -> str:
    """Return the absolute run root on the cluster, with ``~`` and the cluster's variables expanded.

    Raises:
        RequestInvalid: a variable in it is not set there, or Slurm cannot store the path.
        TransportError: the path depends on the login node, which cannot be reached.
    """
    text = _unexpanded_root(context, cluster, request)
    forbidden_match = re.search(r"[%\x00-\x1f\x7f]", text)
    if forbidden_match:
        raise RequestInvalid(
            [f"the run root {text!r} contains {forbidden_match[0]!r}, which Slurm changes in file names"]
        )
    if not cluster.remote:
        return str(context.cwd / _expand_variables(text, context.env, "here")).rstrip("/")
    node = query_login_node(context, cluster, variables_in(text))
    return f"{Path(node.home) / _expand_variables(text, node.env, f'on {node.host}')}".rstrip("/")


def _unexpanded_root(context: Context, cluster: ActiveCluster, request: JobRequest | None) -> str:
    """Return the run root of the request, else $DTSLURM_RUN_ROOT on this machine, else the profile's."""
    requested_root = request.run_root if request else None
    from_env = None if cluster.remote else context.env.get("DTSLURM_RUN_ROOT")
    return requested_root or from_env or cluster.profile.paths.run_root


def _expand_variables(text: str, env: Mapping[str, str], host_text: str) -> str:
    expanded_home = re.sub(r"^~(?=/|$)", "$HOME", text)
    missing = [name for name in _variable_names(expanded_home) if not env.get(name)]
    if missing:
        raise RequestInvalid([f"the run root {text!r} needs ${missing[0]}, which is not set {host_text}"])
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: env[match[1] or match[2]], expanded_home)


def _variable_names(text: str) -> list[str]:
    return [braced or bare for braced, bare in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)]


def _root_for_shell(text: str, context: Context) -> str:
    """Return the run root with ``~`` as $HOME and relative paths made absolute; variables stay unexpanded."""
    text = re.sub(r"^~(?=/|$)", "$HOME", text)
    return text if text.startswith(("/", "$")) else str(context.cwd / text)
