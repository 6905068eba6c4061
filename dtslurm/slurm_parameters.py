"""Convert parameters of submitit's Slurm executor to options of ``dtslurm submit``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from dtslurm.errors import RequestInvalid
from dtslurm.model.units import Walltime

# sbatch options of the same name, which dtslurm passes on without interpreting them.
_PASSED_ON_PARAMETERS = (
    "comment", "cpus_per_gpu", "exclusive", "gpus_per_task", "gres", "mail_type", "mail_user", "mem_per_cpu",
    "mem_per_gpu", "wckey",
)  # fmt: skip
_GPU_PARAMETERS = ("gpus_per_node", "gpus_per_task", "gres", "num_gpus")
# Parameters that have no option of ``submit`` of the same name.
NAMES = {
    *_PASSED_ON_PARAMETERS,
    *("additional_parameters", "array_parallelism", "num_gpus", "signal_delay_s", "srun_args"),
    *("stderr_to_stdout", "use_srun"),
}
_SRUN_IS_REQUIRED = (
    "use_srun=False is not supported: dtslurm starts functions with srun, which reports how each "
    "task ended. In a function that submits jobs, unset the SLURM_* variables first, or use "
    "submitit's executor 'slurm'"
)


def convert_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``submit`` for parameters under the names of submitit or of ``submit``.

    Raises:
        RequestInvalid: a parameter is not supported.
    """
    options = {name: value for name, value in parameters.items() if value is not None}
    if options.pop("use_srun", True) is not True:
        raise RequestInvalid([_SRUN_IS_REQUIRED])
    if "num_gpus" in options:
        warnings.warn("num_gpus is deprecated, use gpus_per_node", DeprecationWarning, stacklevel=2)
        options["gpus_per_node"] = options.pop("num_gpus")
    if "signal_delay_s" in options:
        options.setdefault("signal_before", options["signal_delay_s"])
        del options["signal_delay_s"]
    if isinstance(options.get("time"), float):
        options["time"] = str(Walltime(max(1, round(options["time"] * 60))))
    passed = {name: options.pop(name) for name in _PASSED_ON_PARAMETERS if name in options}
    passed = {name: value for name, value in passed.items() if value is not False}
    additional = options.pop("additional_parameters", {})
    if not isinstance(additional, Mapping):
        raise RequestInvalid([f"additional_parameters should be a mapping, not {additional!r}"])
    passed |= additional
    if passed:
        options["sbatch"] = (
            *_as_tuple(options.get("sbatch", ())),
            *(_format_option(*name_and_value) for name_and_value in passed.items()),
        )
    if "srun_args" in options:
        options["launcher_options"] = (
            *_as_tuple(options.get("launcher_options", ())),
            *_parse_srun_arguments(_as_tuple(options.pop("srun_args")), options.get("launcher")),
        )
    return options


def asks_for_gpus(parameters: Mapping[str, Any]) -> bool:
    """Return whether a parameter requests GPUs. Without one, submitit's jobs have no GPUs."""
    names_and_options = [
        *(parameters.get("additional_parameters") or {}),
        *_as_tuple(parameters.get("sbatch") or ()),
    ]
    is_passed_on = any("gpus" in text or "gres" in text for text in names_and_options)
    return is_passed_on or any(parameters.get(name) is not None for name in _GPU_PARAMETERS)


def _format_option(name: str, value: object) -> str:
    """Return an option of sbatch in submitit's notation."""
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag}={value}"


def _as_tuple(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _parse_srun_arguments(arguments: Iterable[str], launcher: str | None) -> list[str]:
    """Convert arguments of srun to launcher options, ``NAME`` or ``NAME=VALUE``.

    Raises:
        RequestInvalid: the launcher is not ``srun``, or an argument is not a long option.
    """
    options: list[str] = []
    for text in arguments:
        if text.startswith("--"):
            options.append(text.removeprefix("--"))
        elif options and not text.startswith("-") and "=" not in options[-1]:
            options[-1] += f"={text}"
        else:
            raise RequestInvalid([f"srun_args: {text!r} is not a long option; write --NAME=VALUE"])
    if options and launcher not in {None, "srun"}:
        raise RequestInvalid([f"srun_args go to srun, but launcher {launcher} starts the ranks; remove them"])
    return options
