"""Detection of the launcher that suits a training script, from the script's imports and calls alone.

The script is parsed, never run.

Reading the source yields names, each with the location of its first use: imported or used dotted names
(``torch.distributed``), called names followed by ``()``, and string constants in quotes.
``_SCRIPT_KINDS`` maps these names to kinds of scripts; the first match counts.

A job with one rank gets ``single``, which sets no variables: scripts that initialize a process group only if
RANK is set then train as they do without a launcher. It gets a launcher for several ranks if the script fails
without RANK and MASTER_ADDR. That is the case if the script reads one of them with ``os.environ[...]`` or
initializes a process group unconditionally, or under conditions that mention none of these variables, or if
it takes its rank from Slurm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from dtslurm.launch.detection.conditions import is_certain
from dtslurm.launch.detection.evidence import (
    CONFIGURATIONS,
    LIGHTNING,
    RANK_VARIABLES,
    ScriptEvidence,
    configuration,
    imported_files,
    own_launcher,
    parse_source,
    read,
)
from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Detection:
    """The detected launcher, the evidence for it, and warnings of what will not work with it."""

    launcher: str
    why: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ScriptKind:
    """One kind of scripts, and the launchers that start them.

    Attributes:
        pattern: a regular expression; a script with a name that matches it is of this kind.
        launchers: the launchers that can start such a script, best first.
        note: text that follows the evidence in the message to the user.
        by_itself: whether such a script starts its processes itself, or drives all GPUs from one process.
        needs_env: whether its process group takes RANK and MASTER_ADDR from the environment, even for one
            rank (see `_needs_variables`).
        unless: a regular expression; a script with a name that matches it is not of this kind.
    """

    pattern: str
    launchers: tuple[str, ...]
    note: str = ""
    by_itself: bool = False
    needs_env: bool = False
    unless: str = r"$."


_RANK_VARIABLE_STRINGS = rf"'({RANK_VARIABLES})'"
_ACCELERATE_NAMES = r"accelerate\.(\w+\.)*(Accelerator|PartialState)"
_TRAINER_NAMES = r"transformers\.(\w+\.)*(Seq2Seq)?(Trainer|TrainingArguments)"
_FRAMEWORKS = (
    r"(axolotl|colossalai|composer|detectron2|fairseq2?|ignite|litgpt|llamafactory|mmcv|mmdet|mmengine|"
    r"nanotron|nemo|sentence_transformers|torchtune|trl|ultralytics)(\..*)?"
)
_INIT_CALLS = r"(.*\.)?init_(process_group|device_mesh|rpc|distributed\w*|dist\w*)"
_DISTRIBUTED_STARTS = "|".join(
    [
        *(_INIT_CALLS, LIGHTNING, _ACCELERATE_NAMES, _TRAINER_NAMES, _FRAMEWORKS),
        r"(horovod|megatron|torchtitan|mpi4py)(\..*)?",
        r"ray\..+",
        r"deepspeed\.initialize",
        r"(.*\.)?(MultiWorkerMirroredStrategy|initialize_megatron)",
        r"jax\.distributed\.initialize",
    ]
)
_SPAWN_CALLS = (
    r"torch\.multiprocessing(\.spawn)?\.(spawn|start_processes)|accelerate\.(\w+\.)*notebook_launcher"
)
# A name that matches shows that each rank gets its own GPU.
_ASSIGNS_GPUS = (
    rf"{LIGHTNING}|{_ACCELERATE_NAMES}|{_TRAINER_NAMES}|deepspeed\.initialize|\$CUDA_VISIBLE_DEVICES"
)
_SINGLE_PROCESS_CALLS = r"torch\.nn\.(parallel\.)?DataParallel\(\)|(.*\.)?(?<!Worker)MirroredStrategy\(\)"
_TASK_PER_RANK_LAUNCHERS = ("srun", "jax", "lightning", "tensorflow")
_READS_ENV_NOTE = ", which reads torchrun's variables"
_SCRIPT_KINDS = (
    _ScriptKind(r"ray\..+", ("ray",), by_itself=True, needs_env=True),
    _ScriptKind(LIGHTNING, ("lightning", "torchrun", "srun")),
    _ScriptKind(r"horovod\..+", ("horovod", "mpi", "srun")),
    _ScriptKind(r"(.*\.)?MultiWorkerMirroredStrategy", ("tensorflow", "srun")),
    _ScriptKind(r"jax\.distributed\.initialize", ("jax", "srun"), ", which reads its rank from Slurm"),
    _ScriptKind(r"mpi4py\.MPI(\..*)?", ("mpi", "srun"), unless=_RANK_VARIABLE_STRINGS),
    _ScriptKind(
        _SPAWN_CALLS,
        ("single",),
        ", which starts the ranks itself",
        by_itself=True,
        unless=_RANK_VARIABLE_STRINGS,
    ),
    _ScriptKind(  # all ranks of torchrun share one Slurm task, so each would read the same SLURM_PROCID
        r"'SLURM_PROCID'",
        _TASK_PER_RANK_LAUNCHERS,
        ", the rank number of Slurm",
        needs_env=True,
        unless=rf"'RANK'|{_SPAWN_CALLS}",
    ),
    _ScriptKind(r"megatron(\..*)?", ("megatron", "torchrun", "srun"), needs_env=True),
    _ScriptKind(r"torchtitan(\..*)?", ("torchtitan", "torchrun", "srun"), needs_env=True),
    _ScriptKind(r"deepspeed(\..*)?", ("torchrun", "deepspeed", "srun"), _READS_ENV_NOTE, needs_env=True),
    _ScriptKind(_ACCELERATE_NAMES, ("torchrun", "accelerate", "srun"), _READS_ENV_NOTE),
    _ScriptKind(_TRAINER_NAMES, ("torchrun", "accelerate", "srun"), _READS_ENV_NOTE),
    _ScriptKind(rf"torch\.distributed(\..*)?|{_INIT_CALLS}", ("torchrun", "srun"), needs_env=True),
    _ScriptKind(_FRAMEWORKS, ("torchrun", "srun")),
    _ScriptKind(_SINGLE_PROCESS_CALLS, ("single",), ": one process for all GPUs of a node", by_itself=True),
    _ScriptKind(
        r"(jax|flax)(\..*)?", ("jax", "srun"), ": one process for all GPUs of a node", by_itself=True
    ),
    _ScriptKind(r"tensorflow(\..*)?", ("tensorflow", "srun")),
)
_TRAINING_FRAMEWORKS = r"(torch|jax|flax|tensorflow|keras|transformers|sklearn)(\..*)?"
# Packages that never start a process group unless the script's own code does.
_NEVER_DISTRIBUTED = re.compile(
    r"PIL|absl|accelerate|bitsandbytes|click|cv2|datasets|deepspeed|einops|evaluate"
    r"|flash_attn|flax|h5py|huggingface_hub|hydra|jax|jaxlib|joblib|keras|loguru|"
    r"matplotlib|mlflow|numpy|omegaconf|optax|orbax|pandas|peft|psutil|requests|"
    r"rich|safetensors|scipy|seaborn|sentencepiece|sklearn|tensorboard|tensorboardX|"
    r"tensorflow|tiktoken|timm|tokenizers|torch|torchaudio|torchmetrics|torchvision|"
    r"tqdm|transformers|triton|typer|wandb|yaml"
)
_RANK_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")


class ScriptText(NamedTuple):
    """A script as far as it can be read before it runs.

    Attributes:
        source: the text of ``name``: a Python file, another executable or a configuration file.
        name: the script as the user names it.
        args: the arguments that it receives.
        siblings: the texts of other files by path relative to the script's folder; `imported_files` lists the
            paths that are read.
    """

    source: str
    name: str
    args: Sequence[str] = ()
    siblings: Mapping[str, str] = MappingProxyType({})


class RequestedRanks(NamedTuple):
    """The sizes of a job.

    Attributes:
        are_chosen: whether the user set ``per_node``; otherwise it is the default of one rank per GPU.
    """

    nodes: int
    per_node: int
    gpus_per_node: int = 0
    are_chosen: bool = False


@dataclass(frozen=True)
class _ScriptCase:
    """The evidence from a script, and the request for which it needs a launcher."""

    evidence: ScriptEvidence
    script: str
    args: Sequence[str]
    requested: RequestedRanks
    has_unread_imports: bool = False

    @property
    def ranks(self) -> int:
        return self.requested.nodes * self.requested.per_node


def detect(
    script: ScriptText,
    ranks: RequestedRanks,
    *,
    launchers: Collection[str] = ("single", "srun", "torchrun"),
    launcher: str | None = None,
) -> Detection:
    """Return the launcher for a script, the evidence for it, and warnings. Never raises.

    Args:
        launchers: the names of the existing launchers.
        launcher: the launcher that the user chose. It is returned in any case, with warnings if it does not
            suit the script.
    """
    source, siblings = script.source, script.siblings
    default = _choose_by_ranks(ranks.nodes * ranks.per_node, launchers)
    is_one_rank = ranks.nodes == 1 and (ranks.per_node == 1 or not ranks.are_chosen)
    single_is_possible = is_one_rank and "single" in launchers
    name = PurePosixPath(script.name).name or script.name
    if name.endswith(CONFIGURATIONS):
        return _detect_for_configuration(source, name, default, launchers, launcher)
    first_line = source.lstrip("\ufeff").partition("\n")[0]
    if not name.endswith(".py") and not ("python" in first_line and first_line.startswith("#!")):
        launcher_evidence = own_launcher(source, name)
        chosen_launcher = launcher or ("single" if launcher_evidence and single_is_possible else default[0])
        warnings = (
            [f"{launcher_evidence}: each rank would start its own ranks"]
            if launcher_evidence and chosen_launcher != "single"
            else []
        )
        return Detection(
            chosen_launcher,
            f"{launcher_evidence}, itself a launcher"
            if launcher_evidence
            else f"{name} is not Python{default[1]}",
            (*warnings,),
        )
    tree, syntax_error = parse_source(source)
    if tree is None:
        return Detection(
            launcher or default[0], f"{name} cannot be read as Python ({syntax_error}){default[1]}"
        )
    evidence = _collect_evidence(tree, source, name, siblings)
    sibling_modules = {path.partition("/")[0].removesuffix(".py") for path in siblings}
    has_unread_imports = any(
        package not in sibling_modules and not _NEVER_DISTRIBUTED.fullmatch(package)
        for package in evidence.imports
    )
    script_case = _ScriptCase(evidence, name, script.args, ranks, has_unread_imports)
    if launcher_evidence := own_launcher("", name):
        return Detection(
            launcher or default[0],
            f"{launcher_evidence}{default[1]}",
            (f"{launcher_evidence}: each rank would start its own ranks",),
        )
    return _detect_for_script(script_case, launchers, single_is_possible, launcher)


def find_size_conflicts(script: ScriptText, ranks: RequestedRanks) -> tuple[str, ...]:
    """Return warnings where a script's Lightning Trainer has other sizes than the job. Never raises."""
    tree, _ = parse_source(script.source)
    if tree is None:
        return ()
    name = PurePosixPath(script.name).name or script.name
    evidence = _collect_evidence(tree, script.source, name, script.siblings)
    return tuple(_find_lightning_sizes(_ScriptCase(evidence, name, script.args, ranks), None, ""))


def resumes_from_checkpoints(script: ScriptText) -> bool:
    """Return whether a script restores its newest checkpoint with ``dtslurm.train``. Never raises."""
    if not any("dtslurm" in text for text in (script.source, *script.siblings.values())):
        return False
    tree, _ = parse_source(script.source)
    if tree is None:
        return False
    evidence = _collect_evidence(tree, script.source, script.name, script.siblings)
    return evidence.has(r"dtslurm\.train(\..*)?") and evidence.has(r"(.*\.)?restore\(\)")


def _collect_evidence(
    tree: ast.Module, source: str, name: str, siblings: Mapping[str, str]
) -> ScriptEvidence:
    """Return the evidence from a script and from the sibling files that it imports."""
    evidence = ScriptEvidence()
    local_modules = {path.removesuffix(".py") for path in siblings if "/" not in path}
    read(tree, name, evidence, local_modules)
    for path in imported_files(source):
        imported_tree = parse_source(siblings[path])[0] if path in siblings else None
        if imported_tree is not None:
            read(imported_tree, path, evidence, local_modules)
    return evidence


def _choose_by_ranks(ranks: int, launchers: Collection[str]) -> tuple[str, str]:
    """Return the default launcher for a number of ranks, and a note that explains it."""
    preferred = "single" if ranks == 1 else "torchrun"
    name = preferred if preferred in launchers or not launchers else min(launchers)
    return name, f"; {name} for one rank" if ranks == 1 else f"; {name} for {ranks} ranks"


def _detect_for_configuration(
    source: str, name: str, size: tuple[str, str], launchers: Collection[str], launcher: str | None
) -> Detection:
    framework, suited_launcher = configuration(source, name)
    if not suited_launcher:
        return Detection(launcher or size[0], f"{name} is a configuration file of an unknown kind{size[1]}")
    evidence = f"{name} is a {framework} configuration"
    if suited_launcher in launchers and launcher in {None, suited_launcher}:
        return Detection(suited_launcher, evidence)
    hint = (
        f"-l {suited_launcher} starts it"
        if suited_launcher in launchers
        else f"launcher {suited_launcher} is not installed"
    )
    return Detection(launcher or size[0], evidence + size[1], (f"{evidence}, not a script; {hint}",))


def _detect_for_script(
    script_case: _ScriptCase, launchers: Collection[str], single_is_possible: bool, launcher: str | None
) -> Detection:
    kind, evidence = _find_kind(script_case.evidence)
    warnings: list[str] = []
    if launcher is not None:
        chosen_launcher = launcher
        warnings += _find_launcher_conflicts(script_case, kind, evidence, launchers, chosen_launcher)
    elif kind is None:
        chosen_launcher, default_note = _choose_by_ranks(script_case.ranks, launchers)
        evidence = f"{script_case.script} imports no known framework{default_note}"
    else:
        chosen_launcher, launcher_warnings = _choose_launcher(
            script_case, kind, launchers, single_is_possible
        )
        warnings += [f"{evidence}: {line}" for line in launcher_warnings]
        evidence += (
            kind.note
            if chosen_launcher != "single" or kind.by_itself
            else ", which needs no launcher for one rank"
        )
    if chosen_launcher in {"single", "ray"}:
        script_case = replace(script_case, requested=script_case.requested._replace(nodes=1, per_node=1))
    warnings += [line for check in _WARNING_CHECKS for line in check(script_case, kind, chosen_launcher)]
    return Detection(chosen_launcher, evidence, tuple(dict.fromkeys(warnings)))


def _find_kind(evidence: ScriptEvidence) -> tuple[_ScriptKind | None, str]:
    """Return the kind of a script, and the evidence for it."""
    for kind in _SCRIPT_KINDS:
        match = evidence.first(kind.pattern)
        if match and not evidence.has(kind.unless):
            name, verb, location = match
            return kind, f"{verb} {name.removesuffix('()').removeprefix('?.')} ({location})"
    return None, ""


def _choose_launcher(
    script_case: _ScriptCase, kind: _ScriptKind, launchers: Collection[str], single_is_possible: bool
) -> tuple[str, list[str]]:
    """Return the best available launcher for a request, and warnings of what is lost with it."""
    candidates = list(kind.launchers)
    if script_case.ranks == 1 and not _needs_variables(script_case, kind) and "single" in launchers:
        return "single", []
    if kind.by_itself and single_is_possible and candidates[0] != "ray":
        candidates.insert(0, "single")
    elif kind.by_itself and single_is_possible:
        candidates.append("single")
    available = [
        name for name in candidates if name in launchers and (name != "single" or single_is_possible)
    ]
    chosen_launcher = available[0] if available else _choose_by_ranks(script_case.ranks, launchers)[0]
    if chosen_launcher == candidates[0] or candidates[0] == "single":
        return chosen_launcher, []
    return chosen_launcher, [
        f"the best launcher, {candidates[0]}, is not installed; {chosen_launcher} is used"
    ]


def _needs_variables(script_case: _ScriptCase, kind: _ScriptKind) -> bool:
    """Return whether a single rank fails without the variables that launchers for several ranks set."""
    evidence = script_case.evidence
    if kind.by_itself:
        return kind.needs_env
    if any(use.name in _RANK_ENVIRONMENT and is_certain(use, evidence.calls) for use in evidence.variables):
        return True
    if not kind.needs_env or not evidence.has(_DISTRIBUTED_STARTS) or evidence.has(r"'(tcp|file)://.*"):
        return False
    init_calls = [call for call in evidence.calls if re.fullmatch(_INIT_CALLS, call.name)]
    if any(is_certain(call, evidence.calls) for call in init_calls) or evidence.has("'SLURM_PROCID'"):
        return True
    return not evidence.has(_RANK_VARIABLE_STRINGS) and not evidence.has("'LOCAL_RANK'")


def _find_launcher_conflicts(
    script_case: _ScriptCase,
    kind: _ScriptKind | None,
    evidence: str,
    launchers: Collection[str],
    launcher: str,
) -> list[str]:
    """Return why the launcher that the user chose does not suit a script."""
    if kind is None:
        return []
    if launcher == "single":
        lacks_variables = not kind.by_itself and _needs_variables(script_case, kind)
        return (
            [f"{evidence}, but launcher single does not set RANK; use -l torchrun"] if lacks_variables else []
        )
    suited_launchers = [name for name in kind.launchers if name in launchers]
    if script_case.ranks == 1 or launcher in kind.launchers or kind.by_itself or not suited_launchers:
        return []
    return [f"{evidence}, which launcher {launcher} does not support; use -l {suited_launchers[0]}"]


def _find_independent_ranks(script_case: _ScriptCase, kind: _ScriptKind | None, launcher: str) -> list[str]:
    """Return a warning if ranks form no process group, or if each rank starts processes of its own."""
    del launcher
    if script_case.ranks == 1:
        return []
    if kind is not None and kind.by_itself and "jax" not in kind.launchers:
        _, evidence = _find_kind(script_case.evidence)
        hint = (
            f"use -l {kind.launchers[0]}"
            if kind.launchers != ("single",) or script_case.requested.nodes == 1
            else "start a single rank"
        )
        return [f"{evidence}: each of the {script_case.ranks} ranks would do this separately; {hint}"]
    if (
        script_case.evidence.has(_DISTRIBUTED_STARTS)
        or script_case.evidence.has(_RANK_VARIABLE_STRINGS)
        or not script_case.evidence.has(_TRAINING_FRAMEWORKS)
    ):
        return []
    exception = "unless an imported package does this, " if script_case.has_unread_imports else ""
    return [
        (
            f"{script_case.script} never initializes a process group: "
            f"{exception}every rank would train separately"
        )
    ]


def _find_lightning_sizes(script_case: _ScriptCase, kind: _ScriptKind | None, launcher: str) -> list[str]:
    """Return warnings if a Lightning Trainer is given other sizes than the job has."""
    del kind, launcher
    sizes = (
        ("num_nodes", script_case.requested.nodes, "nodes"),
        ("devices", script_case.requested.per_node, "ranks per node"),
    )
    warnings = []
    for keywords, location in script_case.evidence.trainers:
        for key, expected_size, unit in sizes:
            configured = _parse_count(
                keywords.get(key, 1 if key == "num_nodes" and "**" not in keywords else None)
            )
            if configured not in {None, expected_size}:
                keyword = f"{key}={keywords[key]!r}" if key in keywords else f"no {key}, which means 1"
                warnings.append(
                    f"{location}: the Lightning Trainer has {keyword}, but the job has {expected_size} {unit}"
                )
    for key, expected_size, unit in sizes if script_case.evidence.has(LIGHTNING) else ():
        configured = _parse_count(_find_argument(script_case.args, rf"--(trainer\.)?{key}"))
        if configured not in {None, expected_size}:
            warnings.append(f"argument {key} is {configured}, but the job has {expected_size} {unit}")
    return warnings


def _parse_count(value: Any) -> int | None:
    """Return the number of nodes or devices that a literal means, None if the literal leaves it open."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)+,?", value):
        return len(value.rstrip(",").split(","))
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _find_argument(args: Sequence[str], flag: str) -> str | None:
    """Return the value of an option among the script's arguments, None if the option is absent."""
    for number, word in enumerate(args):
        option, equals, value = word.partition("=")
        if re.fullmatch(flag, option):
            return value if equals else next(iter(args[number + 1 : number + 2]), "")
    return None


def _find_overwritten_variables(
    script_case: _ScriptCase, kind: _ScriptKind | None, launcher: str
) -> list[str]:
    """Return warnings if the script overwrites variables of the launcher with fixed values."""
    del kind
    ranks = script_case.requested
    warnings = []
    for name, value, location in script_case.evidence.env:
        is_local_address = (
            name == "MASTER_ADDR" and ranks.nodes == 1 and value in {"localhost", "127.0.0.1", "::1"}
        )
        if name in _RANK_ENVIRONMENT and script_case.ranks > 1 and not is_local_address:
            warnings.append(
                f"{location}: sets {name} to {value!r} and overrides the value of launcher {launcher}; "
                "remove it"
            )
        devices_needed = max(ranks.gpus_per_node, ranks.per_node)
        devices = len([item for item in value.split(",") if item.strip()])
        if name == "CUDA_VISIBLE_DEVICES" and devices < devices_needed and devices_needed > 1:
            warnings.append(
                f"{location}: sets CUDA_VISIBLE_DEVICES to {value!r}, "
                f"but a node has {ranks.per_node} ranks and {ranks.gpus_per_node} GPUs"
            )
    return warnings


def _find_shared_gpu(script_case: _ScriptCase, kind: _ScriptKind | None, launcher: str) -> list[str]:
    """Return warnings if all ranks of a node use its first GPU."""
    del kind, launcher
    ranks, evidence = script_case.requested, script_case.evidence
    if ranks.per_node < 2 or ranks.gpus_per_node < 2 or evidence.has(_ASSIGNS_GPUS):
        return []
    consequence = f"all {ranks.per_node} ranks of a node would share its first GPU"
    warnings = []
    if "first" in evidence.devices and _find_argument(script_case.args, "--device") is None:
        warnings.append(
            f"{evidence.devices['first']}: a fixed device such as cuda:0; use LOCAL_RANK, otherwise "
            f"{consequence}"
        )
    if "current" in evidence.devices and not evidence.has(r"(.*\.)?set_device(_index)?"):
        warnings.append(f"{evidence.devices['current']}: cuda without torch.cuda.set_device: {consequence}")
    return warnings


def _find_local_rank_option(script_case: _ScriptCase, kind: _ScriptKind | None, launcher: str) -> list[str]:
    """Return warnings of ``--local_rank``, which launchers no longer pass."""
    del kind
    if script_case.ranks == 1:
        return []
    warnings = []
    match = script_case.evidence.first(r"'--local[_-]rank'")
    if match and not script_case.evidence.has(r"'(LOCAL_RANK|SLURM_LOCALID)'"):
        warnings.append(
            f"{match[2]}: expects {match[0][1:-1]}, which launcher {launcher} does not pass; read "
            "os.environ['LOCAL_RANK']"
        )
    if _find_argument(script_case.args, r"--local[_-]rank") is not None:
        warnings.append("argument --local_rank is the same for every rank; remove it")
    return warnings


_WARNING_CHECKS = (
    _find_independent_ranks,
    _find_lightning_sizes,
    _find_overwritten_variables,
    _find_shared_gpu,
    _find_local_rank_option,
)
