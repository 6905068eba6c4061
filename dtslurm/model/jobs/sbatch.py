"""The options that dtslurm passes on to sbatch and srun, and those that it refuses with the reasons."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence

_DTSLURM_OPTION = {
    "account": "-A/--account",
    "array": "-a/--array",
    "chdir": "-D/--chdir",
    "constraint": "-C/--constraint",
    "cpus-per-gpu": "-c/--cpus-per-task",
    "cpus-per-task": "-c/--cpus-per-task",
    "dependency": "-d/--dependency",
    "exclude": "-x/--exclude",
    "gpus": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "gpus-per-socket": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "job-name": "-J/--job-name",
    "nodelist": "-w/--nodelist",
    "nodes": "-N/--nodes",
    "ntasks": "--ntasks-per-node",
    "ntasks-per-core": "--ntasks-per-node",
    "ntasks-per-gpu": "--ntasks-per-node",
    "ntasks-per-node": "--ntasks-per-node",
    "ntasks-per-socket": "--ntasks-per-node",
    "partition": "-p/--partition",
    "qos": "-q/--qos",
    "signal": "--signal and --signal-before",
    "tasks-per-node": "--ntasks-per-node",
    "time": "-t/--time",
}
_GPU_KEYS = "slurm.gpu_request, and the node type's gpus"
_PROFILE_KEY = {
    "account": "slurm.account",
    "constraint": "slurm.constraint",
    "gpus": _GPU_KEYS,
    "gpus-per-node": _GPU_KEYS,
    "gpus-per-socket": _GPU_KEYS,
    "gpus-per-task": _GPU_KEYS,
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "time": "slurm.default_time",
}
_UNSUPPORTED = {
    "clusters": "dtslurm would not find the job; select the profile of the other cluster with --cluster",
    "error": "dtslurm reads the job's output from the run directory; -e/--error adds a copy",
    "export": "the script sets its own environment; --env and --setup extend it",
    "export-file": "the script sets its own environment; --env and --setup extend it",
    "help": "sbatch would queue no job",
    "input": "the standard input would go to the script, not to the ranks",
    "output": "dtslurm reads the job's output from the run directory; -o/--output adds a copy",
    "parsable": "dtslurm reads sbatch's answer itself",
    "test-only": "sbatch would queue no job; dtslurm render shows the script",
    "usage": "sbatch would queue no job",
    "version": "sbatch would queue no job",
    "wait": "sbatch would not return; dtslurm submit --wait waits for the run",
    "wrap": "dtslurm writes the script; --setup runs lines before training",
}
_TASK_EXIT_IS_HANDLED = "dtslurm decides whether the other ranks end when one rank ends"
_STEP_NODES_ARE_SET = "dtslurm selects the nodes of each step"
_STARTS_NOTHING = "srun would start nothing"
# The same for srun: options that the script's own steps set, which a profile's option would override.
_SRUN_PROFILE_KEY = {
    "cpu-bind": "slurm.cpu_bind",
    "distribution": "slurm.distribution",
    "gpu-bind": "slurm.gpu_bind",
    "mpi": "slurm.mpi",
}
_SRUN_DTSLURM_OPTION = {
    name: _DTSLURM_OPTION[name]
    for name in (
        *("cpus-per-task", "exclude", "nodes"),
        *("ntasks", "ntasks-per-gpu", "ntasks-per-node", "tasks-per-node"),
    )
}
_OUTPUT_IS_LOGGED = "dtslurm reads the job's output from the run directory"
_SRUN_UNSUPPORTED = {
    "error": _OUTPUT_IS_LOGGED,
    "export": _UNSUPPORTED["export"],
    "help": _STARTS_NOTHING,
    "kill-on-bad-exit": _TASK_EXIT_IS_HANDLED,
    "nodefile": _STEP_NODES_ARE_SET,
    "nodelist": _STEP_NODES_ARE_SET,
    "output": _OUTPUT_IS_LOGGED,
    "relative": _STEP_NODES_ARE_SET,
    "test-only": _STARTS_NOTHING,
    "usage": _STARTS_NOTHING,
    "version": _STARTS_NOTHING,
    "wait": _TASK_EXIT_IS_HANDLED,
}
_SRUN_SHORT_OPTIONS = {
    "F": "nodefile",
    "K": "kill-on-bad-exit",
    "N": "nodes",
    "V": "version",
    "W": "wait",
    "c": "cpus-per-task",
    "e": "error",
    "h": "help",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "r": "relative",
    "w": "nodelist",
    "x": "exclude",
}
_SIGNAL = re.compile(r"(B:)?(?:SIG)?([A-Za-z0-9]+)(?:@(\d+))?")
_DEFAULT_LEAD_S = 60  # sbatch's default if --signal has no seconds
_GENERIC_RESOURCE_OPTIONS = {"gres", "tres-per-job", "tres-per-node", "tres-per-socket", "tres-per-task"}
_GPU_RESOURCE = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:=,]|$)")  # gpu:2, gpu:a100:2, gres/gpu:2
_MIN_PREFIX = 3  # letters of a prefix; shorter ones are invalid or ambiguous for sbatch


def split_option(text: str) -> tuple[str, str | None]:
    """Split ``--name=value`` into its parts; the value is None for a bare ``--name``.

    Raises:
        ValueError: the text is not a long option.
    """
    match = re.fullmatch(r"--([a-z][a-z0-9_-]*)(?:=(.*))?", text, flags=re.DOTALL)
    if not match:
        raise ValueError(f"{text!r} is not a long option of sbatch; write --name or --name=value")
    return match[1], match[2]


def shares_gpu(options: Sequence[str]) -> bool:
    """Return whether sbatch options request a share of a GPU, which excludes whole GPUs."""
    values = [text.partition("=")[2] for text in options if text.startswith("--gres=")]
    kinds = {item.partition(":")[0].removeprefix("gres/") for value in values for item in value.split(",")}
    return not kinds.isdisjoint({"mps", "shard"})


def split_signal(text: str) -> tuple[str, int | None]:
    """Split sbatch's ``[B:]SIGNAL[@SECONDS]`` into the signal's name and the seconds before the time limit.

    Malformed text is returned unchanged, so that a later check refuses it. A plain name has no seconds.
    """
    match = _SIGNAL.fullmatch(text)
    if not match:
        return text, None
    batch, name, seconds = match.groups()
    if name.isdecimal():
        name_by_number = {str(int(number)): number.name.removeprefix("SIG") for number in signal.Signals}
        name = name_by_number.get(name, name)
    lead_s = int(seconds) if seconds else _DEFAULT_LEAD_S if batch else None
    return name.upper(), lead_s


def refusal(text: str, *, profile: bool = False) -> str | None:
    """Return why dtslurm does not pass an option on to sbatch, None if it does.

    Args:
        profile: whether the option is in a cluster profile, which has its own keys for some options.
    """
    try:
        name = _classify_option(*split_option(text))
    except ValueError as error:
        return str(error)
    return _explain_refusal(text, name, _PROFILE_KEY if profile else {}, _DTSLURM_OPTION, _UNSUPPORTED)


def srun_refusal(text: str, *, in_profile: bool = True) -> str | None:
    """Return why dtslurm does not pass an option on to a job's srun, None if it does.

    Args:
        in_profile: whether the option is in a cluster profile, which has its own keys for some options.
    """
    if text.startswith("--"):
        known_names = (*_SRUN_PROFILE_KEY, *_SRUN_DTSLURM_OPTION, *_SRUN_UNSUPPORTED)
        name = _complete_name(text[2:].partition("=")[0], known_names)
    else:
        name = _SRUN_SHORT_OPTIONS.get(text[1:2], text)
    keys = _SRUN_PROFILE_KEY if in_profile else {}
    return _explain_refusal(text, name, keys, _SRUN_DTSLURM_OPTION, _SRUN_UNSUPPORTED)


def _explain_refusal(
    text: str, name: str, keys: Mapping[str, str], asked_by: Mapping[str, str], breaks: Mapping[str, str]
) -> str | None:
    if name in keys:
        return f"{text!r} would bypass dtslurm; write {keys[name]}"
    if name in asked_by:
        return f"{text!r} would contradict the generated script; use {asked_by[name]}"
    return f"{text!r} cannot be passed to Slurm: {breaks[name]}" if name in breaks else None


def _classify_option(name: str, value: str | None) -> str:
    """Return an option's full name, or ``gpus`` for a generic resource option that requests GPUs."""
    requests_gpus = name in _GENERIC_RESOURCE_OPTIONS and _GPU_RESOURCE.search(value or "")
    return "gpus" if requests_gpus else _complete_name(name, (*_DTSLURM_OPTION, *_UNSUPPORTED))


def _complete_name(name: str, option_names: Collection[str]) -> str:
    """Return an option's full name; like Slurm, accept an unambiguous prefix of a name."""
    matches = [candidate for candidate in option_names if candidate.startswith(name)]
    return matches[0] if len(matches) == 1 and len(name) >= _MIN_PREFIX else name
