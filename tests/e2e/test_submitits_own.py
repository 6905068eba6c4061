"""submitit's own tests, from its installed package, on dtslurm's executor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import submitit

from tests.e2e.conftest import WITHOUT_SSH, Cli
from tests.e2e.submitit_adapter import PROFILE

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[2]
PACKAGE = Path(submitit.__file__).parent

# Tests that say nothing of an executor in the place of submitit's, by the beginning of their names.
NOT_OURS = {
    "auto/test_auto.py::test_auto_batch_watcher": "looks at a mock of sacct",
    "core/test_async.py::test_result": "needs pytest-asyncio, and has an executor of its own",
    "core/test_plugins.py::test_find_good_plugin": "expects that no other plugin is installed",
    "core/test_plugins.py::test_skip_bad_plugin": "expects that no other plugin is installed",
    "local/test_local.py::test_local_job": "looks at the private process of a local job",
    "local/test_local.py::test_killed": "kills the private process of a local job",
    "local/test_local.py::test_cancel": "knows no state but INTERRUPTED, and looks at a private process",
    "slurm/test_slurm.py::test_mocked_missing_state": "looks at a mock of sacct",
    "slurm/test_slurm.py::test_slurm_job_mocked": "looks at a mock of sbatch",
    "slurm/test_slurm.py::test_slurm_job_array_mocked": "looks at a mock of sbatch",
    "slurm/test_slurm.py::test_slurm_error_mocked": "looks at a mock of sbatch",
    "slurm/test_slurm.py::test_get_id_from_submission_command": "reads sbatch's words by a private method",
    "slurm/test_slurm.py::test_slurm_through_auto": "has a mock of shutil.which that takes one argument",
    "slurm/test_slurm.py::test_slurm_weird_dir": "looks for its own #SBATCH lines in the script",
    "slurm/test_slurm.py::test_slurm_job_no_stderr": "writes the files of a mocked job itself",
    "slurm/test_slurm.py::test_requeuing": "has a mocked job, and a private method",
    "slurm/test_slurm.py::test_checkpoint_and_exit": "the same",
    "test_documentation.py::test_assert_markdown_links": "looks for the repository of submitit around it",
    "test_helpers.py::test_snapshot": "looks for the repository of submitit around it",
    "test_helpers.py::test_job_use_snapshot": "looks for the repository of submitit around it",
}
# Those that hold on an idle machine alone: each has to start a job within one to three seconds.
IN_A_HURRY = (
    "core/test_utils.py::test_command_function_deadlock",
    "local/test_local.py::test_requeuing",
    "local/test_local.py::test_custom_checkpoint",
    "test_helpers.py::test_as_completed",
)


@WITHOUT_SSH
def test_submitit_test_suite_passes(cli: Cli, tmp_path: Path) -> None:
    left_out = [f"--deselect=submitit/{name}" for name in (*NOT_OURS, *IN_A_HURRY)]
    argv = [sys.executable, "-m", "pytest", "-p", "tests.e2e.submitit_adapter", "--pyargs", "submitit", "-q"]
    options = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={PACKAGE.parent}", "--timeout=300"]
    env = {**os.environ, **cli.env, "PYTHONPATH": str(ROOT), PROFILE: cli.cluster}
    done = subprocess.run(
        [*argv, *options, *left_out],
        env=env,
        cwd=cli.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 80
