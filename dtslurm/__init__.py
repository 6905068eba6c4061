"""dtslurm: from a training script to a correct, fast, fault-tolerant run on any Slurm cluster.

``submit``, ``Job`` and ``Cluster`` are defined in `dtslurm.api`, ``Executor`` (for submitit) in
`dtslurm.executor`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like typing's, without its import, during which Ctrl-C would print a traceback
if TYPE_CHECKING:
    from typing import Any

    from dtslurm.api import Cluster, Job, submit
    from dtslurm.executor import DtslurmExecutor as Executor

__version__ = "0.2.0.dev0"
__all__ = ["Cluster", "Executor", "Job", "__version__", "submit"]

_PUBLIC_NAMES = {
    "Cluster": ("dtslurm.api", "Cluster"),
    "Job": ("dtslurm.api", "Job"),
    "submit": ("dtslurm.api", "submit"),
    "Executor": ("dtslurm.executor", "DtslurmExecutor"),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'dtslurm' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PUBLIC_NAMES[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name not in {"cloudpickle", "submitit"}:
            raise
        raise ImportError(
            f"dtslurm.{name} needs {error.name}: pip install 'dtslurm[submitit]'", name=error.name
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
