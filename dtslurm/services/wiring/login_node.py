"""The properties of a cluster's login node that dtslurm needs: read by one command, cached for a day."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm.errors import CommandNotFound, DtslurmError, RequestInvalid, StoreError, TransportError
from dtslurm.model.own_files import read_own_file
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass
from dtslurm.remote.worker_program import PYTHONS
from dtslurm.store.index import cache_folder
from dtslurm.transport.deletion import remove

if TYPE_CHECKING:
    from dtslurm.services.wiring.context import ActiveCluster, Context

_CACHE_TTL_S = 86400.0
NO_PYTHON = "set login.python in the cluster's profile"

# A login shell sets the site's variables ($SCRATCH, $WORK). The newline before each key separates it from
# anything that the shell's start-up files print.
_QUERY_SCRIPT = f"""\
printf '\\nhome=%s\\nuser=%s\\nuid=%s\\nhost=%s\\n' "$HOME" "$(id -un)" "$(id -u)" "$(uname -n)"
for python in "$1" {" ".join(PYTHONS)}; do
  [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null || continue
  # A name may lead through a script that looks for the real one at each call.
  real=$("$python" -c 'import sys; print(sys.executable)' 2>/dev/null)
  [ "$("$real" -I -S -c 'print(6 * 7)' 2>/dev/null)" = 42 ] && python=$real
  printf 'python=%s\\n' "$python"
  break
done
shift
[ "$#" -eq 0 ] && exit
bash -lc 'for name do printf "\\nvariable=%s=%s\\n" "$name" "${{!name}}"; done' bash "$@" </dev/null
"""


@dataclass(frozen=True)
class LoginNode:
    """A login node.

    Attributes:
        host: its node name, from ``uname -n``.
        home: the user's home directory.
        user: the user's account name.
        python: a Python of version 3.6 or later, empty if none was found.
        uid: the user's numeric id.
        variables: the requested environment variables that are set in a login shell.
        seen_at: when the command ran, in seconds since the epoch.
    """

    host: str
    home: str
    user: str
    python: str
    uid: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    seen_at: float = 0.0

    @property
    def env(self) -> dict[str, str]:
        """The variables that a path on the cluster may contain."""
        return {**self.variables, "HOME": self.home, "USER": self.user}


def query_login_node(context: Context, cluster: ActiveCluster, names: Sequence[str] = ()) -> LoginNode:
    """Return the cluster's login node, from the cache or by a command on the login node.

    Args:
        context: its clock decides whether the cached copy is still valid.
        cluster: the cluster.
        names: environment variables whose values are needed.

    Raises:
        TransportError: the login node cannot be reached, or its output names no home directory.
    """
    path = cache_path(context, cluster)
    cached_node = _read(path)
    if (
        cached_node is not None
        and cached_node.python  # not cached if missing: the user may have installed one since
        and set(names) <= set(cached_node.variables)
        and 0 <= context.clock() - cached_node.seen_at < _CACHE_TTL_S
    ):
        return cached_node
    python = cluster.access.python or ""
    variable_names = sorted({*names, *(cached_node.variables if cached_node else ())})
    answer = cluster.transport.run(["sh", "-c", _QUERY_SCRIPT, "sh", python, *variable_names], timeout=60)
    login_node = _parse_login_node(answer.stdout, context.clock())
    if login_node is None:
        raise TransportError(
            f"cannot find the home folder on {cluster.transport.host}",
            evidence=[*answer.stdout.splitlines()[-5:], *answer.stderr.splitlines()[-5:]],
        )
    with contextlib.suppress(StoreError):  # the next call asks the login node again
        context.transport.put(json.dumps(asdict(login_node)).encode(), str(path))
    return login_node


def find_remote_python(context: Context, cluster: ActiveCluster) -> str:
    """Return the Python that runs dtslurm's worker programs on a login node.

    Raises:
        CommandNotFound: there is none of version 3.6 or later.
        TransportError: see `query_login_node`.
    """
    python = query_login_node(context, cluster).python
    if not python:
        raise CommandNotFound(f"{cluster.transport.host} has no Python 3.6 or later", hint=NO_PYTHON)
    return python


def expand_cluster_home(context: Context, cluster: ActiveCluster, path: str) -> str:
    """Return a path with a leading ``~`` expanded to the user's home on the cluster.

    Raises:
        RequestInvalid: the path begins with ``~USER``, and the cluster is reached over SSH.
        TransportError: see `query_login_node`.
    """
    if not cluster.remote:
        return str(expand_home(path))
    if not path.startswith("~"):
        return path
    if path.partition("/")[0] != "~":
        raise RequestInvalid(
            [f"{path}: write the absolute path; on {cluster.transport.host} only your own ~ is expanded"]
        )
    return query_login_node(context, cluster).home + path[1:]


def explain_local_path(context: Context, cluster: ActiveCluster, path: str) -> str:
    """Return the reason why a path is missing on a cluster that has another home; empty without a reason."""
    local_home = str(expand_home("~", context.env.get("HOME", "")))
    if not cluster.remote or not f"{path}/".startswith(f"{local_home}/"):
        return ""
    node = query_login_node(context, cluster)
    if node.home == local_home:
        return ""
    host = cluster.transport.host
    return (
        f": the path is below the home of this machine, and your home on {host} is {node.home}; write "
        f"'~{path[len(local_home) :]}', with the quotes"
    )


def forget(context: Context, cluster: ActiveCluster) -> None:
    """Delete the cached properties of the login node; the next `query_login_node` reads them again."""
    with contextlib.suppress(OSError):
        remove(cache_path(context, cluster), within=cache_folder(context.env))


def variables_in(text: str) -> list[str]:
    """Return the variables in a path of the profile, except HOME and USER, which are always known."""
    names = [braced or bare for braced, bare in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)]
    return [name for name in dict.fromkeys(names) if name not in {"HOME", "USER"}]


def cache_path(context: Context, cluster: ActiveCluster, kind: str = "") -> Path:
    """Return the path of the cache file for a cluster's login node; ``kind`` names one of several."""
    name = re.sub(r"[^\w.@-]", "-", f"{cluster.name}-{cluster.transport.host}")
    return cache_folder(context.env) / "sites" / f"{name}{kind and '.'}{kind}.json"


def _read(path: Path) -> LoginNode | None:
    try:
        return LoginNode(**json.loads(read_own_file(path)))
    except (OSError, ValueError, TypeError, DtslurmError):
        return None


def _parse_login_node(output: str, now: float) -> LoginNode | None:
    fields: dict[str, str] = {}
    variables: dict[str, str] = {}
    for line in output.splitlines():
        key, _, value = line.partition("=")
        if key == "variable":
            name, _, value = value.partition("=")
            if value:
                variables[name] = value
        else:
            fields.setdefault(key, value)
    if not fields.get("home", "").startswith("/"):
        return None
    return LoginNode(
        host=fields.get("host", ""),
        home=fields["home"],
        user=fields.get("user", ""),
        python=fields.get("python", ""),
        uid=int(fields["uid"]) if fields.get("uid", "").isdecimal() else None,
        variables=variables,
        seen_at=now,
    )
