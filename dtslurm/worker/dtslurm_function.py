"""Run a pickled function as one rank of a job, using submitit's protocol: ``dtslurm_function.py [FOLDER]``.

The pickles are in the same folder as this file: ``0.pkl``, or one per array task. Results are written to
FOLDER (default: the folder of this file) under submitit's names. dtslurm copies this file to the run
directory. The job's environment must have submitit. A ``dist-info`` folder next to this file registers this
module as a submitit plugin, in the rank and in its child processes.
"""

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, ClassVar, Dict

from submitit import helpers
from submitit.core import job_environment, plugins, submission, utils
from submitit.slurm.slurm import SlurmJobEnvironment

HERE = "DTSLURM_FUNCTIONS"
LOWER_TASKS_S = 10.0  # for the tasks with lower numbers to fail too


class FunctionPaths(utils.JobPaths):
    """submitit's paths, except for the submitted pickle, which is in the run directory."""

    @property
    def submitted_pickle(self) -> Path:
        """The pickled function and arguments; after a checkpoint, those that resume the work."""
        return Path(os.environ[HERE]) / (os.environ.get("SLURM_ARRAY_TASK_ID", "0") + ".pkl")


class DtslurmJobEnvironment(SlurmJobEnvironment):
    """The job environment, read from torch's variables, which every launcher of dtslurm sets."""

    _env: ClassVar[Dict[str, str]] = {
        **SlurmJobEnvironment._env,  # noqa: SLF001 - submitit's environments are declared this way
        "num_tasks": "WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def activated(self) -> bool:
        """Return whether this process is a rank of a function job, or a descendant of one."""
        return HERE in os.environ

    @property
    def paths(self) -> FunctionPaths:
        """The paths of the submission, the result and the logs."""
        return FunctionPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)


def _export(
    place: helpers.TorchDistributedEnvironment, set_cuda_visible_devices: bool = True, overwrite: bool = False
) -> helpers.TorchDistributedEnvironment:
    """Replace ``export``, which raises an error if variables such as RANK are set; dtslurm sets them."""
    del overwrite
    place.master_addr = os.environ.get("MASTER_ADDR", place.master_addr)
    return _original_export(place, set_cuda_visible_devices, overwrite=True)


_original_export = helpers.TorchDistributedEnvironment.export
if HERE in os.environ:
    setattr(helpers.TorchDistributedEnvironment, "export", _export)  # noqa: B010 - mypy rejects an assignment


def main() -> None:
    """Run this rank's function and write its result, or its exception, to the result folder."""
    os.environ.setdefault("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))  # DeepSpeed does not set it
    environment = DtslurmJobEnvironment()
    if not isinstance(job_environment.JobEnvironment(), DtslurmJobEnvironment):
        # Earlier versions of submitit try the Slurm environment first, which matches every Slurm job.
        environments: Any = {environment.name(): environment}
        setattr(plugins, "get_job_environments", lambda: environments)  # noqa: B010 - mypy rejects an assignment
    try:
        submission.process_job(sys.argv[1] if len(sys.argv) > 1 else os.environ[HERE])
    except Exception:
        write_error(environment.paths.result_pickle)
        wait_for_lower_tasks(environment.paths)
        raise


def wait_for_lower_tasks(paths: FunctionPaths) -> None:
    """Wait, for at most LOWER_TASKS_S, until the tasks with lower numbers have written their results.

    The end of this task ends the others. If several tasks fail together, submitit's error of the job is that
    of the lowest number, and it must not depend on which task was the fastest.
    """
    deadline = time.monotonic() + LOWER_TASKS_S
    for number in range(paths.task_id):
        result = FunctionPaths(paths.folder, job_id=paths.job_id, task_id=number).result_pickle
        while not result.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def write_error(result: Path) -> None:
    """Write the exception in place of a missing result, for example after a disk-full error.

    The partial result file is deleted first: it blocks the new file, and deleting it may free enough space.
    """
    part = result.with_suffix(result.suffix + ".save_tmp")
    if part.exists() and not result.exists():
        part.unlink()
        with utils.temporary_save_path(result) as path:
            utils.cloudpickle_dump(("error", traceback.format_exc()), path)


def start() -> None:
    """Register this file as a submitit plugin for this process and its children, and run the function."""
    folder = str(Path(__file__).resolve().parent)
    os.environ[HERE], os.environ["SUBMITIT_EXECUTOR"] = folder, "dtslurm"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    sys.path[0] = str(Path.cwd())  # make the project's modules importable, as python -m does
    sys.path.append(folder)
    importlib.import_module("dtslurm_function").main()  # submitit imports the plugin under this name


if __name__ == "__main__":
    start()
