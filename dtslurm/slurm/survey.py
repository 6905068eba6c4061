"""The cluster survey: a shell script that collects facts on a login node, and its parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.units import Memory
from dtslurm.model.values import dataclass
from dtslurm.slurm import commands, fields, parse, parse_scontrol
from dtslurm.slurm.parse_errors import distinct_lines
from dtslurm.slurm.parse_sacctmgr import Association, associations
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo

MARK = "\x1e"
RUNTIMES = ("apptainer", "singularity", "enroot", "podman-hpc", "podman", "shifter", "sarus", "ch-run")
_SINFO_COLUMNS = ("%N", "%R", "%c", "%X", "%Y", "%Z", "%m", "%T", "%G", "%f")
_SEPARATOR = "|"
_REQUIRED_PARTS = ("config", "partitions", "nodes", "associations")

# Arguments: the time limit of each command in seconds, and Python programs to try. Slurm's commands run one
# after the other, so that the controller never handles two requests of the survey at the same time. Commands
# that make no request to the controller run in parallel.
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
  grep -q '^NodeName=' "$work/nodes" || ask sinfo sinfo -h -N -o '{_SEPARATOR.join(_SINFO_COLUMNS)}'
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
    """A folder that an environment variable of the login shell names; sizes are in KiB."""

    variable: str
    path: str
    kind: str = ""
    size: int | None = None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The facts that a survey collected on a login node.

    Attributes:
        host: the login node's name, with its domain if known.
        by: the command that listed the nodes.
        offered: the values that ``srun --mpi`` accepts.
        pyxis: whether ``srun`` has the option ``--container-image``.
        silent: the parts without an answer, each with its error message.
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
        """Slurm's version, empty if unknown."""
        return self.config.get("SLURM_VERSION", "")

    @property
    def cluster(self) -> str:
        """The cluster's name in slurm.conf, empty if unknown."""
        return self.config.get("ClusterName", "")


def build_survey_command(limit: int, pythons: list[str]) -> list[str]:
    """Return the survey command.

    It makes at most 5 requests to the controller, and ends each of its commands after ``limit`` seconds.
    """
    return ["sh", "-c", SCRIPT, "dtslurm-discover", str(limit), *pythons]


def read(output: str) -> Survey:
    """Parse the survey's output; parts that are missing or cannot be parsed are empty."""
    sections = _split_sections(output)
    host = _parse_pairs(sections.get("host", ""))
    config = parse_scontrol.config(sections.get("config", ""))
    nodes, nodes_source = parse_scontrol.nodes(sections.get("nodes", "")), "scontrol show node"
    if not nodes:
        nodes, nodes_source = sinfo(sections.get("sinfo", "")), "sinfo"
    partitions = parse_scontrol.partitions(sections.get("partitions", ""))
    answers = {
        "config": config.get("ClusterName"), "partitions": partitions, "nodes": nodes,
        "associations": associations(sections.get("associations", "")),
    }  # fmt: skip
    silent_parts = {
        name: "; ".join(distinct_lines(sections.get(name, ""))[:2])[:200] or "no answer"
        for name in _REQUIRED_PARTS
        if not answers[name]
    }
    return Survey(
        host=next((name for name in (*host.get("domain", ()), *host.get("name", ())) if name), ""),
        user=next(iter(host.get("user", ())), ""),
        python=next(iter(host.get("python", ())), ""),
        config=config if config.get("ClusterName") else {},
        partitions=tuple(partitions),
        nodes=tuple(nodes),
        by=nodes_source,
        associations=tuple(associations(sections.get("associations", ""))),
        offered=tuple(parse.mpi_types(sections.get("mpi", ""))),
        modules=_parse_modules(sections.get("modules", "")),
        folders=_parse_folders(sections.get("folders", "")),
        runtimes=tuple(host.get("runtime", ())),
        pyxis="--container-image" in sections.get("srun", ""),
        missing=tuple(host.get("missing", ())),
        silent=silent_parts,
    )


def sinfo(output: str) -> list[NodeInfo]:
    """Parse ``sinfo -N`` with the columns of the survey: one entry per node, with all its partitions."""
    nodes_by_name: dict[str, NodeInfo] = {}
    for line in output.split("\n"):
        row = [fields.text(word) for word in line.split(_SEPARATOR, len(_SINFO_COLUMNS) - 1)]
        if len(row) != len(_SINFO_COLUMNS) or not row[0]:
            continue
        name, partition, cpus, sockets, cores, threads, memory, state, gres, features = row
        previous_row = nodes_by_name.get(name)
        memory_mib = fields.count(memory.rstrip("+"))
        nodes_by_name[name] = NodeInfo(
            name=name,
            partitions=(
                *(previous_row.partitions if previous_row else ()),
                *([partition] if partition else ()),
            ),
            cpus=fields.count(cpus.rstrip("+")),
            sockets=fields.count(sockets.rstrip("+")),
            cores_per_socket=fields.count(cores.rstrip("+")),
            threads_per_core=fields.count(threads.rstrip("+")) or 1,
            memory=Memory(memory_mib) if memory_mib else None,
            gpus=parse_scontrol.gpus(gres),
            state=state.upper(),
            features=tuple(feature for feature in features.split(",") if feature),
            address=name,
        )
    return list(nodes_by_name.values())


def _split_sections(output: str) -> dict[str, str]:
    sections: dict[str, str] = {}
    for section in output.split(MARK)[1:]:
        name, _, text = section.partition("\n")
        sections.setdefault(name, text)
    return sections


def _parse_pairs(text: str) -> dict[str, list[str]]:
    values_by_key: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, separator, value = line.partition("=")
        if separator:
            values_by_key.setdefault(key, []).append(value.strip())
    return values_by_key


def _parse_modules(text: str) -> tuple[str, ...]:
    """Parse ``module -t avail``: one name per line, under headings that end with a colon."""
    lines = (line.strip() for line in text.split("\n"))
    names = (re.sub(r"\s*(?:\([^()]*\))+$", "", line) for line in lines if not line.endswith(":"))
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[A-Za-z][\w.+/-]*", name)))


def _parse_folders(text: str) -> tuple[NamedFolder, ...]:
    df_by_path: dict[str, tuple[str, int | None, int | None]] = {}
    path_by_variable: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("df="):
            # PATH DEVICE TYPE SIZE USED FREE PERCENT MOUNT; the path and the device may contain spaces
            match = re.match(r"df=(\S+) .*?\s(\S+)\s+(\d+)\s+\d+\s+(\d+)\s+\d+%", line)
            if match:
                df_by_path[match[1]] = match[2], int(match[3]), int(match[4])
            continue
        name, separator, path = line.partition("=")
        if separator and path.startswith("/") and name.isidentifier():
            path_by_variable.setdefault(name, path)
    return tuple(
        NamedFolder(name, path, *df_by_path.get(path, ("", None, None)))
        for name, path in path_by_variable.items()
    )
