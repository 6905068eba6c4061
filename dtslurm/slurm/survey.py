"""One look at all that a login node can tell of its cluster: a shell script, and its answer read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.units import Memory
from dtslurm.model.values import dataclass
from dtslurm.slurm import commands, fields, parse, parse_scontrol
from dtslurm.slurm.parse_errors import words
from dtslurm.slurm.parse_sacctmgr import Association, associations
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo

MARK = "\x1e"
RUNTIMES = ("apptainer", "singularity", "enroot", "podman-hpc", "podman", "shifter", "sarus", "ch-run")
_SINFO = ("%N", "%R", "%c", "%X", "%Y", "%Z", "%m", "%T", "%G", "%f")
_SEPARATOR = "|"
_NOT_ASKED = ("config", "partitions", "nodes", "associations")

# Arguments: seconds for each command, and Pythons to try. Slurm's own commands follow each other, so that the
# controller never has two questions of ours at once; what does not ask it goes on beside them.
SCRIPT = rf"""
{commands.LOGIN_PATH}
limit=$1
shift
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT PIPE TERM
ask() {{ name=$1; shift; timeout "$limit" "$@" >"$work/$name" 2>&1 </dev/null; }}
{{
  ask config {" ".join(commands.show_config())}
  ask partitions {" ".join(commands.show_partitions())}
  ask nodes {" ".join(commands.show_nodes())}
  grep -q '^NodeName=' "$work/nodes" || ask sinfo sinfo -h -N -o '{_SEPARATOR.join(_SINFO)}'
  ask mpi srun --mpi=list
  ask srun sh -c 'srun --help | grep -- --container-image'
}} &
ask associations {" ".join(commands.show_associations('"$(id -un)"'))} &
ask modules bash -lc 'module -t avail' &
ask folders bash -lc '
  env | grep -E "^(HOME|TMPDIR|[A-Z_]*SCRATCH[A-Z_]*|[A-Z_]*WORK|PROJECT[A-Z_]*|[A-Z]*STORE)=/" | sort
  env | sed -nE "s/^(HOME|TMPDIR|[A-Z_]*SCRATCH[A-Z_]*|[A-Z_]*WORK|PROJECT[A-Z_]*|[A-Z]*STORE)=(\/.*)/\2/p" |
    while read -r path; do df -PkT "$path" 2>/dev/null | tail -n 1 | sed "s|^|df=$path |"; done' &
{{
  printf 'name=%s\nuser=%s\n' "$(uname -n)" "$(id -un)"
  printf 'domain=%s\n' "$(timeout 5 hostname -f 2>/dev/null)"
  for python in "$@"; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null </dev/null || continue
    printf 'python=%s\n' "$python"
    break
  done
  for name in scontrol sinfo sbatch sacctmgr; do
    command -v "$name" >/dev/null || printf 'missing=%s\n' "$name"
  done
  for name in {" ".join(RUNTIMES)}; do
    command -v "$name" >/dev/null && printf 'runtime=%s\n' "$name"
  done
}} >"$work/host" 2>/dev/null </dev/null &
wait
for file in "$work"/*; do printf '\n\036%s\n' "${{file##*/}}"; cat "$file"; done
"""


@dataclass(frozen=True)
class NamedFolder:
    """A folder that a variable of the login shell names; sizes in KiB."""

    variable: str
    path: str
    kind: str = ""
    size: int | None = None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a login node told.

    Attributes:
        host: the login node's name, with its domain where it knows that.
        by: which command told of the nodes.
        offered: what ``srun --mpi`` takes.
        pyxis: whether ``srun`` takes ``--container-image``.
        silent: what gave no answer, and its words.
    """

    host: str = ""
    user: str = ""
    python: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[PartitionInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    by: str = "scontrol show node"
    associations: tuple[Association, ...] = ()
    offered: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    folders: tuple[NamedFolder, ...] = ()
    runtimes: tuple[str, ...] = ()
    pyxis: bool = False
    missing: tuple[str, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Slurm's version, empty if it told none."""
        return self.config.get("SLURM_VERSION", "")

    @property
    def cluster(self) -> str:
        """The cluster's name in slurm.conf, empty if it told none."""
        return self.config.get("ClusterName", "")


def question(limit: int, pythons: list[str]) -> list[str]:
    """Return the command: at most 5 requests to the controller, each part cut off after ``limit`` seconds."""
    return ["sh", "-c", SCRIPT, "dtslurm-discover", str(limit), *pythons]


def read(output: str) -> Survey:
    """Read the answer; what is not in it, or makes no sense, is empty."""
    parts = _parts(output)
    host = _pairs(parts.get("host", ""))
    config = parse_scontrol.config(parts.get("config", ""))
    nodes, by = parse_scontrol.nodes(parts.get("nodes", "")), "scontrol show node"
    if not nodes:
        nodes, by = sinfo(parts.get("sinfo", "")), "sinfo"
    partitions = parse_scontrol.partitions(parts.get("partitions", ""))
    found = {
        "config": config.get("ClusterName"), "partitions": partitions, "nodes": nodes,
        "associations": associations(parts.get("associations", "")),
    }  # fmt: skip
    silent = {
        name: "; ".join(words(parts.get(name, ""))[:2])[:200] or "no answer"
        for name in _NOT_ASKED
        if not found[name]
    }
    return Survey(
        host=next((name for name in (*host.get("domain", ()), *host.get("name", ())) if name), ""),
        user=next(iter(host.get("user", ())), ""),
        python=next(iter(host.get("python", ())), ""),
        config=config if config.get("ClusterName") else {},
        partitions=tuple(partitions),
        nodes=tuple(nodes),
        by=by,
        associations=tuple(associations(parts.get("associations", ""))),
        offered=tuple(parse.mpi_types(parts.get("mpi", ""))),
        modules=_modules(parts.get("modules", "")),
        folders=_folders(parts.get("folders", "")),
        runtimes=tuple(host.get("runtime", ())),
        pyxis="--container-image" in parts.get("srun", ""),
        missing=tuple(host.get("missing", ())),
        silent=silent,
    )


def sinfo(output: str) -> list[NodeInfo]:
    """Read ``sinfo -N`` by our columns: one entry for each node, with all of its partitions."""
    found: dict[str, NodeInfo] = {}
    for line in output.split("\n"):
        row = [fields.text(word) for word in line.split(_SEPARATOR, len(_SINFO) - 1)]
        if len(row) != len(_SINFO) or not row[0]:
            continue
        name, partition, cpus, sockets, cores, threads, memory, state, gres, features = row
        known = found.get(name)
        size = fields.count(memory.rstrip("+"))
        found[name] = NodeInfo(
            name=name,
            partitions=(*(known.partitions if known else ()), *([partition] if partition else ())),
            cpus=fields.count(cpus.rstrip("+")),
            sockets=fields.count(sockets.rstrip("+")),
            cores_per_socket=fields.count(cores.rstrip("+")),
            threads_per_core=fields.count(threads.rstrip("+")) or 1,
            memory=Memory(size) if size else None,
            gpus=parse_scontrol.gpus(gres),
            state=state.upper(),
            features=tuple(one for one in features.split(",") if one),
            address=name,
        )
    return list(found.values())


def _parts(output: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in output.split(MARK)[1:]:
        name, _, text = piece.partition("\n")
        found.setdefault(name, text)
    return found


def _pairs(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, sign, value = line.partition("=")
        if sign:
            found.setdefault(key, []).append(value.strip())
    return found


def _modules(text: str) -> tuple[str, ...]:
    """Read ``module -t avail``: a name a line, under headings that end with a colon."""
    lines = (line.strip() for line in text.split("\n"))
    names = (re.sub(r"\s*(?:\([^()]*\))+$", "", line) for line in lines if not line.endswith(":"))
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[A-Za-z][\w.+/-]*", name)))


def _folders(text: str) -> tuple[NamedFolder, ...]:
    disks: dict[str, tuple[str, int | None, int | None]] = {}
    named: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("df="):
            # PATH DEVICE TYPE SIZE USED FREE PERCENT MOUNT; a path or a device may hold spaces
            found = re.match(r"df=(\S+) .*?\s(\S+)\s+(\d+)\s+\d+\s+(\d+)\s+\d+%", line)
            if found:
                disks[found[1]] = found[2], int(found[3]), int(found[4])
            continue
        name, sign, path = line.partition("=")
        if sign and path.startswith("/") and name.isidentifier():
            named.setdefault(name, path)
    return tuple(NamedFolder(name, path, *disks.get(path, ("", None, None))) for name, path in named.items())
