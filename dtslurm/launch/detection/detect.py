"""Which launcher suits a training script, told from what it imports and calls; nothing of it is run.

Reading yields names, each with the place where it is first seen: dotted ones that are imported or used
(``torch.distributed``), called ones with ``()`` behind, strings with quotes around.
``_KINDS`` says, best match first, which names make a script one of which kind.

One rank gets ``single``, which sets no variables: scripts that go distributed where RANK is set then train as
they do without a launcher. It gets a launcher of several ranks where the script fails without RANK and
MASTER_ADDR: where it reads one of them by ``os.environ[...]`` or initialises a process group under no
condition, or under conditions that mention none of these variables, or where it takes its rank from Slurm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from dtslurm.launch.detection.conditions import is_certain
from dtslurm.launch.detection.evidence import (
    CONFIGURATIONS,
    LIGHTNING,
    RANK_VARIABLES,
    ScriptEvidence,
    configuration,
    imported_files,
    own_launcher,
    parsed,
    read,
)
from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Detection:
    """A launcher, the evidence for it, and what will not work with it."""

    launcher: str
    why: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kind:
    """Scripts of one kind: ``launchers`` that start them, best first.

    ``by_itself``: such a script starts its processes itself, or drives all GPUs from one.
    ``needs_env``: its process group takes RANK and MASTER_ADDR from the environment, for one rank too (see
    `_needs_variables`). ``unless`` the script has such a name.
    """

    pattern: str
    launchers: tuple[str, ...]
    note: str = ""
    by_itself: bool = False
    needs_env: bool = False
    unless: str = r"$."


_TOLD = rf"'({RANK_VARIABLES})'"
_ACCELERATE = r"accelerate\.(\w+\.)*(Accelerator|PartialState)"
_TRAINER = r"transformers\.(\w+\.)*(Seq2Seq)?(Trainer|TrainingArguments)"
_OTHERS = (
    r"(axolotl|colossalai|composer|detectron2|fairseq2?|ignite|litgpt|llamafactory|mmcv|mmdet|mmengine|"
    r"nanotron|nemo|sentence_transformers|torchtune|trl|ultralytics)(\..*)?"
)
_INIT = r"(.*\.)?init_(process_group|device_mesh|rpc|distributed\w*|dist\w*)"
_STARTS = "|".join(
    [
        *(_INIT, LIGHTNING, _ACCELERATE, _TRAINER, _OTHERS),
        r"(horovod|megatron|torchtitan|mpi4py)(\..*)?",
        r"ray\..+",
        r"deepspeed\.initialize",
        r"(.*\.)?(MultiWorkerMirroredStrategy|initialize_megatron)",
        r"jax\.distributed\.initialize",
    ]
)
_SPAWNS = r"torch\.multiprocessing(\.spawn)?\.(spawn|start_processes)|accelerate\.(\w+\.)*notebook_launcher"
# These give each rank its GPU.
_PLACES_RANKS = rf"{LIGHTNING}|{_ACCELERATE}|{_TRAINER}|deepspeed\.initialize|\$CUDA_VISIBLE_DEVICES"
_ONE_PROCESS = r"torch\.nn\.(parallel\.)?DataParallel\(\)|(.*\.)?(?<!Worker)MirroredStrategy\(\)"
_ONE_TASK_A_RANK = ("srun", "jax", "lightning", "tensorflow")
_READS_ENV = ", which reads torchrun's variables"
_KINDS = (
    _Kind(r"ray\..+", ("ray",), by_itself=True, needs_env=True),
    _Kind(LIGHTNING, ("lightning", "torchrun", "srun")),
    _Kind(r"horovod\..+", ("horovod", "mpi", "srun")),
    _Kind(r"(.*\.)?MultiWorkerMirroredStrategy", ("tensorflow", "srun")),
    _Kind(r"jax\.distributed\.initialize", ("jax", "srun"), ", which learns its place from Slurm"),
    _Kind(r"mpi4py\.MPI(\..*)?", ("mpi", "srun"), unless=_TOLD),
    _Kind(_SPAWNS, ("single",), ", which starts the ranks itself", by_itself=True, unless=_TOLD),
    _Kind(  # torchrun is one task of Slurm for all its ranks: they would take the same place
        r"'SLURM_PROCID'",
        _ONE_TASK_A_RANK,
        ", a rank's place by Slurm",
        needs_env=True,
        unless=rf"'RANK'|{_SPAWNS}",
    ),
    _Kind(r"megatron(\..*)?", ("megatron", "torchrun", "srun"), needs_env=True),
    _Kind(r"torchtitan(\..*)?", ("torchtitan", "torchrun", "srun"), needs_env=True),
    _Kind(r"deepspeed(\..*)?", ("torchrun", "deepspeed", "srun"), _READS_ENV, needs_env=True),
    _Kind(_ACCELERATE, ("torchrun", "accelerate", "srun"), _READS_ENV),
    _Kind(_TRAINER, ("torchrun", "accelerate", "srun"), _READS_ENV),
    _Kind(rf"torch\.distributed(\..*)?|{_INIT}", ("torchrun", "srun"), needs_env=True),
    _Kind(_OTHERS, ("torchrun", "srun")),
    _Kind(_ONE_PROCESS, ("single",), ": one process for all GPUs of a node", by_itself=True),
    _Kind(r"(jax|flax)(\..*)?", ("jax", "srun"), ": one process for all GPUs of a node", by_itself=True),
    _Kind(r"tensorflow(\..*)?", ("tensorflow", "srun")),
)
_TRAINS = r"(torch|jax|flax|tensorflow|keras|transformers|sklearn)(\..*)?"
# Packages that certainly start no process group when a script's own lines do not ask for one.
_QUIET = re.compile(
    r"PIL|absl|accelerate|bitsandbytes|click|cv2|datasets|deepspeed|einops|evaluate"
    r"|flash_attn|flax|h5py|huggingface_hub|hydra|jax|jaxlib|joblib|keras|loguru|"
    r"matplotlib|mlflow|numpy|omegaconf|optax|orbax|pandas|peft|psutil|requests|"
    r"rich|safetensors|scipy|seaborn|sentencepiece|sklearn|tensorboard|tensorboardX|"
    r"tensorflow|tiktoken|timm|tokenizers|torch|torchaudio|torchmetrics|torchvision|"
    r"tqdm|transformers|triton|typer|wandb|yaml"
)
_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")


@dataclass(frozen=True)
class _ScriptCase:
    """A script as read, and the request for it."""

    seen: ScriptEvidence
    script: str
    args: Sequence[str]
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    has_unread_imports: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def detect(  # noqa: PLR0913 - what a script is judged by, all by name
    source: str,
    script: str,
    args: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    siblings: Mapping[str, str] | None = None,
    known: Collection[str] = ("single", "srun", "torchrun"),
    ranks_asked: bool = False,
    launcher: str | None = None,
) -> Detection:
    """Return the launcher for a script, the evidence, and what will not work. Never raises.

    Args:
        source: the text of ``script``, a Python file, another executable or a configuration file.
        siblings: other files, by path from the script's folder; those of ``imported_files`` are read.
        known: the launchers that exist.
        ranks_asked: ``ranks_per_node`` is the user's word, not just one for each GPU.
        launcher: the launcher that is used in any case; only the warnings are news then.
    """
    size = _by_size(nodes * ranks_per_node, known)
    alone = nodes == 1 and (ranks_per_node == 1 or not ranks_asked) and "single" in known
    siblings = siblings or {}
    name = PurePosixPath(script).name or script
    if name.endswith(CONFIGURATIONS):
        return _of_configuration(source, name, size, known, launcher)
    first_line = source.lstrip("\ufeff").partition("\n")[0]
    if not name.endswith(".py") and not ("python" in first_line and first_line.startswith("#!")):
        own = own_launcher(source, name)
        chosen = launcher or ("single" if own and alone else size[0])
        told = [f"{own}: each rank would start ranks of its own"] if own and chosen != "single" else []
        return Detection(
            chosen, f"{own}, itself a launcher" if own else f"{name} is not Python{size[1]}", (*told,)
        )
    tree, fault = parsed(source)
    if tree is None:
        return Detection(launcher or size[0], f"{name} cannot be read as Python ({fault}){size[1]}")
    seen = _read_all(tree, source, name, siblings)
    beside = {path.partition("/")[0].removesuffix(".py") for path in siblings}
    unread = any(top not in beside and not _QUIET.fullmatch(top) for top in seen.imports)
    case = _ScriptCase(seen, name, args, nodes, ranks_per_node, gpus_per_node, has_unread_imports=unread)
    if own := own_launcher("", name):
        return Detection(
            launcher or size[0], f"{own}{size[1]}", (f"{own}: each rank would start ranks of its own",)
        )
    return _of_script(case, known, alone, launcher)


def other_sizes(
    source: str,
    script: str,
    args: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    siblings: Mapping[str, str],
) -> tuple[str, ...]:
    """Return where a script's Lightning Trainer is told other sizes than the job's. Never raises."""
    tree, _ = parsed(source)
    if tree is None:
        return ()
    name = PurePosixPath(script).name or script
    seen = _read_all(tree, source, name, siblings)
    return tuple(_lightning(_ScriptCase(seen, name, args, nodes, ranks_per_node, 0), None, ""))


def resumes_from_checkpoints(source: str, script: str, siblings: Mapping[str, str]) -> bool:
    """Tell whether a script restores its newest checkpoint by ``dtslurm.train``. Never raises."""
    if not any("dtslurm" in text for text in (source, *siblings.values())):
        return False
    tree, _ = parsed(source)
    if tree is None:
        return False
    seen = _read_all(tree, source, script, siblings)
    return seen.has(r"dtslurm\.train(\..*)?") and seen.has(r"(.*\.)?restore\(\)")


def _read_all(tree: ast.Module, source: str, name: str, siblings: Mapping[str, str]) -> ScriptEvidence:
    """Return what a script and the files beside it that it imports say."""
    seen = ScriptEvidence()
    local = {path.removesuffix(".py") for path in siblings if "/" not in path}
    read(tree, name, seen, local)
    for path in imported_files(source):
        other = parsed(siblings[path])[0] if path in siblings else None
        if other is not None:
            read(other, path, seen, local)
    return seen


def _by_size(ranks: int, known: Collection[str]) -> tuple[str, str]:
    """Return the launcher for a number of ranks, and the words that say so."""
    best = "single" if ranks == 1 else "torchrun"
    name = best if best in known or not known else min(known)
    return name, f"; {name} for one rank" if ranks == 1 else f"; {name} for {ranks} ranks"


def _of_configuration(
    source: str, name: str, size: tuple[str, str], known: Collection[str], launcher: str | None
) -> Detection:
    kind, best = configuration(source, name)
    if not best:
        return Detection(launcher or size[0], f"{name} is a configuration file of an unknown kind{size[1]}")
    why = f"{name} is a {kind} configuration"
    if best in known and launcher in {None, best}:
        return Detection(best, why)
    hint = f"-l {best} starts it" if best in known else f"there is no launcher {best} here"
    return Detection(launcher or size[0], why + size[1], (f"{why}, not a script; {hint}",))


def _of_script(case: _ScriptCase, known: Collection[str], alone: bool, launcher: str | None) -> Detection:
    kind, why = _kind(case.seen)
    told: list[str] = []
    if launcher is not None:
        chosen = launcher
        told += _unsuited(case, kind, why, known, chosen)
    elif kind is None:
        chosen, words = _by_size(case.ranks, known)
        why = f"{case.script} imports nothing that tells{words}"
    else:
        chosen, more = _choice(case, kind, known, alone)
        told += [f"{why}: {line}" for line in more]
        why += kind.note if chosen != "single" or kind.by_itself else ", which needs no launcher for one rank"
    if chosen in {"single", "ray"}:
        case = replace(case, nodes=1, ranks_per_node=1)
    told += [line for look in _LOOKS for line in look(case, kind, chosen)]
    return Detection(chosen, why, tuple(dict.fromkeys(told)))


def _kind(seen: ScriptEvidence) -> tuple[_Kind | None, str]:
    """Return what kind of script this is, and the evidence."""
    for kind in _KINDS:
        found = seen.first(kind.pattern)
        if found and not seen.has(kind.unless):
            name, verb, place = found
            return kind, f"{verb} {name.removesuffix('()').removeprefix('?.')} ({place})"
    return None, ""


def _choice(case: _ScriptCase, kind: _Kind, known: Collection[str], alone: bool) -> tuple[str, list[str]]:
    """Return the best launcher that exists and can start such a request, and what is lost."""
    wanted = list(kind.launchers)
    if case.ranks == 1 and not _needs_variables(case, kind) and "single" in known:
        return "single", []
    if kind.by_itself and alone and wanted[0] != "ray":
        wanted.insert(0, "single")
    elif kind.by_itself and alone:
        wanted.append("single")
    possible = [name for name in wanted if name in known and (name != "single" or alone)]
    chosen = possible[0] if possible else _by_size(case.ranks, known)[0]
    if chosen == wanted[0] or wanted[0] == "single":
        return chosen, []
    return chosen, [f"there is no launcher {wanted[0]} here, which suits it best; {chosen} is taken"]


def _needs_variables(case: _ScriptCase, kind: _Kind) -> bool:
    """Return whether a single rank fails without the variables that launchers of several ranks set."""
    seen = case.seen
    if kind.by_itself:
        return kind.needs_env
    if any(use.name in _PLACE and is_certain(use, seen.calls) for use in seen.variables):
        return True
    if not kind.needs_env or not seen.has(_STARTS) or seen.has(r"'(tcp|file)://.*"):
        return False
    starts = [call for call in seen.calls if re.fullmatch(_INIT, call.name)]
    if any(is_certain(call, seen.calls) for call in starts) or seen.has("'SLURM_PROCID'"):
        return True
    return not seen.has(_TOLD) and not seen.has("'LOCAL_RANK'")


def _unsuited(
    case: _ScriptCase, kind: _Kind | None, why: str, known: Collection[str], launcher: str
) -> list[str]:
    """Return why the launcher that is used in any case does not start such a script."""
    if kind is None:
        return []
    if launcher == "single":
        meets = not kind.by_itself and _needs_variables(case, kind)
        return [f"{why}, but launcher single sets no RANK for it; -l torchrun does"] if meets else []
    better = [name for name in kind.launchers if name in known]
    if case.ranks == 1 or launcher in kind.launchers or kind.by_itself or not better:
        return []
    return [f"{why}, which {launcher} does not serve; use -l {better[0]}"]


def _alone(case: _ScriptCase, kind: _Kind | None, launcher: str) -> list[str]:
    """Every rank by itself: no process group, or processes of its own."""
    del launcher
    if case.ranks == 1:
        return []
    if kind is not None and kind.by_itself and "jax" not in kind.launchers:
        _, why = _kind(case.seen)
        hint = (
            f"use -l {kind.launchers[0]}" if kind.launchers != ("single",) or case.nodes == 1 else "start one"
        )
        return [f"{why}: every one of {case.ranks} ranks would do so by itself; {hint}"]
    if case.seen.has(_STARTS) or case.seen.has(_TOLD) or not case.seen.has(_TRAINS):
        return []
    unless = "unless a package that it imports does, " if case.has_unread_imports else ""
    return [f"{case.script} never initialises a process group: {unless}every rank would train by itself"]


def _lightning(case: _ScriptCase, kind: _Kind | None, launcher: str) -> list[str]:
    """A Lightning Trainer's own idea of the job's size."""
    del kind, launcher
    sizes = (("num_nodes", case.nodes, "nodes"), ("devices", case.ranks_per_node, "ranks per node"))
    told = []
    for keywords, place in case.seen.trainers:
        for key, right, unit in sizes:
            given = _count(keywords.get(key, 1 if key == "num_nodes" and "**" not in keywords else None))
            if given not in {None, right}:
                said = f"{key}={keywords[key]!r}" if key in keywords else f"no {key}, which means 1"
                told.append(f"{place}: Lightning is given {said}, but the job has {right} {unit}")
    for key, right, unit in sizes if case.seen.has(LIGHTNING) else ():
        given = _count(_argument(case.args, rf"--(trainer\.)?{key}"))
        if given not in {None, right}:
            told.append(f"argument {key} says {given}, but the job has {right} {unit}")
    return told


def _count(value: Any) -> int | None:
    """Return how many nodes or devices a literal asks for, None if that is left open."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)+,?", value):
        return len(value.rstrip(",").split(","))
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _argument(args: Sequence[str], flag: str) -> str | None:
    """Return the value of an option among the script's arguments."""
    for number, word in enumerate(args):
        option, equals, value = word.partition("=")
        if re.fullmatch(flag, option):
            return value if equals else next(iter(args[number + 1 : number + 2]), "")
    return None


def _environment(case: _ScriptCase, kind: _Kind | None, launcher: str) -> list[str]:
    """Variables that the launcher sets, overwritten with a fixed value."""
    del kind
    told = []
    for name, value, place in case.seen.env:
        local = name == "MASTER_ADDR" and case.nodes == 1 and value in {"localhost", "127.0.0.1", "::1"}
        if name in _PLACE and case.ranks > 1 and not local:
            told.append(f"{place}: sets {name} to {value!r} over what {launcher} sets; remove it")
        needed = max(case.gpus_per_node, case.ranks_per_node)
        devices = len([item for item in value.split(",") if item.strip()])
        if name == "CUDA_VISIBLE_DEVICES" and devices < needed and needed > 1:
            told.append(
                f"{place}: sets CUDA_VISIBLE_DEVICES to {value!r}, "
                f"but a node has {case.ranks_per_node} ranks and {case.gpus_per_node} GPUs"
            )
    return told


def _devices(case: _ScriptCase, kind: _Kind | None, launcher: str) -> list[str]:
    """All ranks of a node on its first GPU."""
    del kind, launcher
    if case.ranks_per_node < 2 or case.gpus_per_node < 2 or case.seen.has(_PLACES_RANKS):
        return []
    all_first = f"all {case.ranks_per_node} ranks of a node would share its first GPU"
    told = []
    if "first" in case.seen.devices and _argument(case.args, "--device") is None:
        told.append(
            f"{case.seen.devices['first']}: fixed on cuda:0 or the like; use LOCAL_RANK, or {all_first}"
        )
    if "current" in case.seen.devices and not case.seen.has(r"(.*\.)?set_device(_index)?"):
        told.append(f"{case.seen.devices['current']}: cuda without torch.cuda.set_device: {all_first}")
    return told


def _local_rank(case: _ScriptCase, kind: _Kind | None, launcher: str) -> list[str]:
    """``--local_rank``, which launchers no longer pass."""
    del kind
    if case.ranks == 1:
        return []
    told = []
    found = case.seen.first(r"'--local[_-]rank'")
    if found and not case.seen.has(r"'(LOCAL_RANK|SLURM_LOCALID)'"):
        told.append(
            f"{found[2]}: takes {found[0][1:-1]}, which {launcher} does not pass; "
            "read os.environ['LOCAL_RANK']"
        )
    if _argument(case.args, r"--local[_-]rank") is not None:
        told.append("--local_rank among the arguments is the same for every rank; leave it out")
    return told


_LOOKS = (_alone, _lightning, _environment, _devices, _local_rank)
