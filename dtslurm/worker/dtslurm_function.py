"""Runs a pickled function as one rank of a job, by submitit's protocol: ``dtslurm_function.py [FOLDER]``.

The pickles lie beside this file, ``0.pkl`` or one for each array task; results go to FOLDER (or here) under
submitit's names. dtslurm copies this file to the run directory. It needs submitit in the job's environment. A
``dist-info`` folder beside it registers it as a plugin of submitit, in the rank and in its child processes.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, ClassVar, Dict

from submitit import helpers
from submitit.core import job_environment, plugins, submission, utils
from submitit.slurm.slurm import SlurmJobEnvironment

HERE = "DTSLURM_FUNCTIONS"


class FunctionPaths(utils.JobPaths):
    """submitit's paths, but for what was submitted, which lies in the run directory."""

    @property
    def submitted_pickle(self) -> Path:
        """The function and its arguments; after a checkpoint, what goes on in their place."""
        return Path(os.environ[HERE]) / (os.environ.get("SLURM_ARRAY_TASK_ID", "0") + ".pkl")


class DtslurmJobEnvironment(SlurmJobEnvironment):
    """The job as every launcher of dtslurm tells of it, by torch's variables."""

    _env: ClassVar[Dict[str, str]] = {
        **SlurmJobEnvironment._env,  # noqa: SLF001 - how submitit's environments are made
        "num_tasks": "WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def activated(self) -> bool:
        """Whether this process is such a rank, or was started by one."""
        return HERE in os.environ

    @property
    def paths(self) -> FunctionPaths:
        """Where submission, result and logs are."""
        return FunctionPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)


def _export(
    place: helpers.TorchDistributedEnvironment, set_cuda_visible_devices: bool = True, overwrite: bool = False
) -> helpers.TorchDistributedEnvironment:
    """Replace ``export``, which raises an error if variables such as RANK are set, as dtslurm sets them."""
    del overwrite
    place.master_addr = os.environ.get("MASTER_ADDR", place.master_addr)
    return _submitits_export(place, set_cuda_visible_devices, overwrite=True)


_submitits_export = helpers.TorchDistributedEnvironment.export
if HERE in os.environ:
    setattr(helpers.TorchDistributedEnvironment, "export", _export)  # noqa: B010 - not for mypy


def main() -> None:
    """Run this rank's function and leave its result, or its exception, in the folder."""
    os.environ.setdefault("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))  # DeepSpeed's ranks have none
    environment = DtslurmJobEnvironment()
    if not isinstance(job_environment.JobEnvironment(), DtslurmJobEnvironment):
        # In earlier versions of submitit the environment of Slurm comes first and matches every Slurm job.
        found: Any = {environment.name(): environment}
        setattr(plugins, "get_job_environments", lambda: found)  # noqa: B010 - not for mypy
    try:
        submission.process_job(sys.argv[1] if len(sys.argv) > 1 else os.environ[HERE])
    except Exception:
        write_error(environment.paths.result_pickle)
        raise


def write_error(result: Path) -> None:
    """Leave the exception where the result should be, if it is not there: the disk did not take the result.

    What was written of that is taken away first; it is in the way, and there may be room for a word then.
    """
    part = result.with_suffix(result.suffix + ".save_tmp")
    if part.exists() and not result.exists():
        part.unlink()
        with utils.temporary_save_path(result) as path:
            utils.cloudpickle_dump(("error", traceback.format_exc()), path)


def start() -> None:
    """Register this file as a plugin of submitit for this process and its children, and run the function."""
    folder = str(Path(__file__).resolve().parent)
    os.environ[HERE], os.environ["SUBMITIT_EXECUTOR"] = folder, "dtslurm"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    sys.path[0] = str(Path.cwd())  # modules of the project, as with python -m
    sys.path.append(folder)
    importlib.import_module("dtslurm_function").main()  # submitit imports the plugin by this name, too


if __name__ == "__main__":
    start()
