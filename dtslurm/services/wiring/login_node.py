"""What must be known of a cluster's login node before anything is sent there: one command, kept for a day."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path

from dtslurm.errors import CommandNotFound, DtslurmError, StoreError, TransportError
from dtslurm.model.own_files import read_own_file
from dtslurm.model.values import dataclass
from dtslurm.remote.worker_program import PYTHONS
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.index import cache_folder
from dtslurm.transport.deletion import remove

_KEPT_S = 86400.0
NO_PYTHON = "name one by login.python in the cluster's profile"

# A login shell sets what a site's users know ($SCRATCH, $WORK); its noise goes before our marks.
_LOOK = f"""\
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
        python: a Python of version 3.6 or later there, empty if none was found.
        variables: the environment variables that were asked for and are set there.
        seen_at: seconds since the epoch.
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
        """What a path of the cluster's side may name."""
        return {**self.variables, "HOME": self.home, "USER": self.user}


def site_of(context: Context, cluster: ActiveCluster, names: Sequence[str] = ()) -> LoginNode:
    """Return what is known of a cluster's login node, asking it if nothing is.

    Args:
        names: environment variables that must be known.

    Raises:
        TransportError: it cannot be reached, or gives no answer that makes sense.
    """
    path = cache_path(context, cluster)
    known = _read(path)
    if (
        known is not None
        and known.python  # who was told that there is none puts one there
        and set(names) <= set(known.variables)
        and 0 <= context.clock() - known.seen_at < _KEPT_S
    ):
        return known
    python = cluster.access.python or ""
    wanted = sorted({*names, *(known.variables if known else ())})
    answer = cluster.transport.run(["sh", "-c", _LOOK, "sh", python, *wanted], timeout=60)
    site = _site(answer.stdout, context.clock())
    if site is None:
        raise TransportError(
            f"{cluster.transport.host} does not tell where its home folder is",
            evidence=[*answer.stdout.splitlines()[-5:], *answer.stderr.splitlines()[-5:]],
        )
    with contextlib.suppress(StoreError):  # it is asked again next time
        context.transport.put(json.dumps(asdict(site)).encode(), str(path))
    return site


def far_python(context: Context, cluster: ActiveCluster) -> str:
    """Return the Python that dtslurm's own programs run with on a login node.

    Raises:
        CommandNotFound: there is none of version 3.6 or later.
        TransportError: as `site_of`.
    """
    python = site_of(context, cluster).python
    if not python:
        raise CommandNotFound(
            f"there is no Python of version 3.6 or later on {cluster.transport.host}", hint=NO_PYTHON
        )
    return python


def forget(context: Context, cluster: ActiveCluster) -> None:
    """Drop what is known, so that the next look is a fresh one."""
    with contextlib.suppress(OSError):
        remove(cache_path(context, cluster), within=cache_folder(context.env))


def variables_in(text: str) -> list[str]:
    """Return the names of the variables in a path of the profile, less those that are always known."""
    names = [a or b for a, b in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)]
    return [name for name in dict.fromkeys(names) if name not in {"HOME", "USER"}]


def cache_path(context: Context, cluster: ActiveCluster, kind: str = "") -> Path:
    """Return where something is remembered of a cluster's login node."""
    name = re.sub(r"[^\w.@-]", "-", f"{cluster.name}-{cluster.transport.host}")
    return cache_folder(context.env) / "sites" / f"{name}{kind and '.'}{kind}.json"


def _read(path: Path) -> LoginNode | None:
    try:
        return LoginNode(**json.loads(read_own_file(path)))
    except (OSError, ValueError, TypeError, DtslurmError):
        return None


def _site(output: str, now: float) -> LoginNode | None:
    found: dict[str, str] = {}
    variables: dict[str, str] = {}
    for line in output.splitlines():
        key, _, value = line.partition("=")
        if key == "variable":
            name, _, value = value.partition("=")
            if value:
                variables[name] = value
        else:
            found.setdefault(key, value)
    if not found.get("home", "").startswith("/"):
        return None
    return LoginNode(
        host=found.get("host", ""),
        home=found["home"],
        user=found.get("user", ""),
        python=found.get("python", ""),
        uid=int(found["uid"]) if found.get("uid", "").isdecimal() else None,
        variables=variables,
        seen_at=now,
    )
