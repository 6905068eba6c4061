"""Where a run keeps its files, and where templates are looked for."""

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
from dtslurm.model.shell import Sh, in_double_quotes
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace
from dtslurm.services.request.request import COMMAND_LINE, JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import site_of, variables_in
from dtslurm.store.blob_cache import BlobCache
from dtslurm.store.index import cache_folder


def templates_of(context: Context, request: JobRequest) -> Templates:
    """Return where templates are looked for: the one asked for, the project, the user, the packaged.

    The user must have trusted those of the project, except one that the command line names. A dry run renders
    untrusted templates, too: a template can only print text.
    """
    own = files.user_folder(context.env)
    project = context.cwd / "templates"
    named = (context.cwd / request.template).parent if request.template else None
    by_a_file = request.origins.get("template", COMMAND_LINE) != COMMAND_LINE
    foreign = (project, *([named] if named and by_a_file else []))
    return Templates(
        folders=tuple(filter(None, (named, project, own / "templates" if own else None, assets.templates()))),
        keeper=BlobCache(cache_folder(context.env) / "templates"),
        foreign=() if context.dry_run else foreign,
        trust=trust_of(context.env),
    )


def place(
    context: Context, cluster: ActiveCluster, request: JobRequest, name: str, *, standalone: bool
) -> RunPlace:
    """Return where this run goes: a fixed new folder, or for plain sbatch one named after the job's id.

    Raises:
        RequestInvalid: the run root cannot be used.
        TransportError: the cluster's login node must tell where it is, and cannot be reached.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "run"
    token = secrets.token_hex(6)
    if standalone:
        root = _written_root(context, cluster, request)
        job = "$SLURM_ARRAY_JOB_ID" if request.array else "$SLURM_JOB_ID"
        return RunPlace(Sh(f'"{in_double_quotes(_shell_root(root, context))}/{slug}-{job}"'), None, token)
    root = run_root(context, cluster, request)
    if request.once:  # the folder is the same whatever else is asked for: who makes it first has the job
        directory = f"{root}/once-{_digest(request.once)}"
        token = _digest(f"{cluster.name}\0{root}\0{request.once}")
    else:
        stamp = datetime.fromtimestamp(context.clock()).strftime("%Y%m%d-%H%M%S")
        directory = f"{root}/{slug}-{stamp}-{token}"
    log = "batch-%a.log" if request.array else "batch.log"
    return RunPlace(directory, f"{directory}/logs/{log}", token)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def run_root(context: Context, cluster: ActiveCluster, request: JobRequest | None = None) -> str:
    """Return the absolute run root on the cluster, with ``~`` and variables of its side filled in.

    Raises:
        RequestInvalid: a variable in it is not set there, or Slurm cannot hold the path.
        TransportError: the login node must tell, and cannot be reached.
    """
    text = _written_root(context, cluster, request)
    unfit = re.search(r"[%\x00-\x1f\x7f]", text)
    if unfit:
        raise RequestInvalid(
            [f"the run root {text!r} holds {unfit[0]!r}, which Slurm does not keep in file names"]
        )
    if not cluster.remote:
        return str(context.cwd / _filled(text, context.env, "here")).rstrip("/")
    site = site_of(context, cluster, variables_in(text))
    return f"{Path(site.home) / _filled(text, site.env, f'on {site.host}')}".rstrip("/")


def _written_root(context: Context, cluster: ActiveCluster, request: JobRequest | None) -> str:
    """Return the run root as asked for, else $DTSLURM_RUN_ROOT on this machine, else the profile's."""
    asked = request.run_root if request else None
    here = None if cluster.remote else context.env.get("DTSLURM_RUN_ROOT")
    return asked or here or cluster.profile.paths.run_root


def _filled(text: str, env: Mapping[str, str], where: str) -> str:
    filled = re.sub(r"^~(?=/|$)", "$HOME", text)
    missing = [name for name in _names_in(filled) if not env.get(name)]
    if missing:
        raise RequestInvalid([f"the run root {text!r} needs ${missing[0]}, which is not set {where}"])
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: env[found[1] or found[2]], filled)


def _names_in(text: str) -> list[str]:
    return [a or b for a, b in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)]


def _shell_root(text: str, context: Context) -> str:
    """Return the run root with ``~`` as $HOME and relative paths made absolute; variables stay."""
    text = re.sub(r"^~(?=/|$)", "$HOME", text)
    return text if text.startswith(("/", "$")) else str(context.cwd / text)
