"""Options that are passed on to sbatch and srun, and those that a job's script is built on and so are not."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence

_IS_ASKED_BY = {
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
_ITS_GPUS = "slurm.gpu_request, and the node type's gpus"
_IN_PROFILES = {
    "account": "slurm.account",
    "constraint": "slurm.constraint",
    "gpus": _ITS_GPUS,
    "gpus-per-node": _ITS_GPUS,
    "gpus-per-socket": _ITS_GPUS,
    "gpus-per-task": _ITS_GPUS,
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "time": "slurm.default_time",
}
_BREAKS = {
    "clusters": "dtslurm would not find the job; --cluster names the profile of the other cluster",
    "error": "a job's output goes into its run directory, where dtslurm reads it; -e/--error adds a copy",
    "export": "the script brings its own environment; --env and --setup add to it",
    "export-file": "the script brings its own environment; --env and --setup add to it",
    "help": "with it sbatch queues nothing",
    "input": "what training reads is given to its ranks, not to the script",
    "output": "a job's output goes into its run directory, where dtslurm reads it; -o/--output adds a copy",
    "parsable": "dtslurm reads sbatch's answer itself",
    "test-only": "with it sbatch queues nothing; dtslurm render shows the script",
    "usage": "with it sbatch queues nothing",
    "version": "with it sbatch queues nothing",
    "wait": "sbatch would not return; dtslurm submit --wait waits for the run",
    "wrap": "the script is dtslurm's; --setup runs lines before training",
}
_ENDS = "dtslurm says itself what becomes of the other ranks when one ends"
_PLACED = "its steps run on all of a job's nodes, or on those that dtslurm chooses"
_STARTS_NONE = "with it srun starts nothing"
# The same for srun: what the script's own steps say, which an option of a profile would replace.
_STEPS_IN_PROFILES = {
    "cpu-bind": "slurm.cpu_bind",
    "distribution": "slurm.distribution",
    "gpu-bind": "slurm.gpu_bind",
    "mpi": "slurm.mpi",
}
_STEPS_ASKED_BY = {
    name: _IS_ASKED_BY[name]
    for name in (
        *("cpus-per-task", "exclude", "nodes"),
        *("ntasks", "ntasks-per-gpu", "ntasks-per-node", "tasks-per-node"),
    )
}
_LOGS = "a job's output goes into its run directory, where dtslurm reads it"
_STEPS_BREAK = {
    "error": _LOGS,
    "export": _BREAKS["export"],
    "help": _STARTS_NONE,
    "kill-on-bad-exit": _ENDS,
    "nodefile": _PLACED,
    "nodelist": _PLACED,
    "output": _LOGS,
    "relative": _PLACED,
    "test-only": _STARTS_NONE,
    "usage": _STARTS_NONE,
    "version": _STARTS_NONE,
    "wait": _ENDS,
}
_STEPS_LETTERS = {
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
_USUAL_LEAD = 60  # seconds, where sbatch's --signal names none
_OF_ANY_KIND = {"gres", "tres-per-job", "tres-per-node", "tres-per-socket", "tres-per-task"}
_WITH_GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:=,]|$)")  # gpu:2, gpu:a100:2, gres/gpu:2
_LEAST = 3  # letters of a beginning; shorter ones sbatch takes for none or for too many


def split_option(text: str) -> tuple[str, str | None]:
    """Split ``--name=value`` into its parts; the value is None for a bare ``--name``.

    Raises:
        ValueError: the text is not a long option.
    """
    found = re.fullmatch(r"--([a-z][a-z0-9_-]*)(?:=(.*))?", text, flags=re.DOTALL)
    if not found:
        raise ValueError(f"{text!r} is not a long sbatch option; write --name or --name=value")
    return found[1], found[2]


def shares_gpu(options: Sequence[str]) -> bool:
    """Return whether options of sbatch ask for a part of a GPU, which excludes whole GPUs."""
    values = [text.partition("=")[2] for text in options if text.startswith("--gres=")]
    kinds = {item.partition(":")[0].removeprefix("gres/") for value in values for item in value.split(",")}
    return not kinds.isdisjoint({"mps", "shard"})


def split_signal(text: str) -> tuple[str, int | None]:
    """Split sbatch's ``[B:]SIGNAL[@SECONDS]`` into the signal's name and the seconds before the time limit.

    Other text is returned as it is, for a check to refuse. A bare name has no seconds.
    """
    found = _SIGNAL.fullmatch(text)
    if not found:
        return text, None
    batch, name, seconds = found.groups()
    if name.isdecimal():
        numbers = {str(int(one)): one.name.removeprefix("SIG") for one in signal.Signals}
        name = numbers.get(name, name)
    lead = int(seconds) if seconds else _USUAL_LEAD if batch else None
    return name.upper(), lead


def refusal(text: str, *, profile: bool = False) -> str | None:
    """Return why an option cannot be passed on, None where it can.

    Args:
        profile: it stands in a cluster profile, which has keys of its own for some.
    """
    try:
        name = _judged_as(*split_option(text))
    except ValueError as error:
        return str(error)
    return _refused(text, name, _IN_PROFILES if profile else {}, _IS_ASKED_BY, _BREAKS)


def srun_refusal(text: str, *, in_profile: bool = True) -> str | None:
    """Return why an option cannot be given to a job's srun, None where it can.

    Args:
        in_profile: it stands in a cluster profile, which has keys of its own for some.
    """
    if text.startswith("--"):
        known = (*_STEPS_IN_PROFILES, *_STEPS_ASKED_BY, *_STEPS_BREAK)
        name = _whole(text[2:].partition("=")[0], known)
    else:
        name = _STEPS_LETTERS.get(text[1:2], text)
    keys = _STEPS_IN_PROFILES if in_profile else {}
    return _refused(text, name, keys, _STEPS_ASKED_BY, _STEPS_BREAK)


def _refused(
    text: str, name: str, keys: Mapping[str, str], asked_by: Mapping[str, str], breaks: Mapping[str, str]
) -> str | None:
    if name in keys:
        return f"{text!r} would go unseen by dtslurm; write {keys[name]}"
    if name in asked_by:
        return f"{text!r} would change what the script is built on; use {asked_by[name]}"
    return f"{text!r} cannot be passed on: {breaks[name]}" if name in breaks else None


def _judged_as(name: str, value: str | None) -> str:
    """Return an option's whole name; ``gpus`` for one of any resource that asks for GPUs."""
    asks_gpus = name in _OF_ANY_KIND and _WITH_GPUS.search(value or "")
    return "gpus" if asks_gpus else _whole(name, (*_IS_ASKED_BY, *_BREAKS))


def _whole(name: str, known: Collection[str]) -> str:
    """Return an option's whole name: Slurm takes beginnings that only one name has."""
    meant = [one for one in known if one.startswith(name)]
    return meant[0] if len(meant) == 1 and len(name) >= _LEAST else name
