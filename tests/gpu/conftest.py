"""Fixtures for tests on a GPU: the command line, exclusive use of the GPU, recording of results."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli, command_line
from tests.frameworks.envs import environment
from tests.gpu import nvidia_smi, results

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
REQUIREMENTS = (
    "torch==2.13.0",
    "accelerate==1.15.0",
    "deepspeed==0.19.8",
    "jax[cuda13]",
    "lightning==2.6.6",
    "numpy",
    "torchtitan==0.2.2",
    "transformers==5.17.0",
)
# Variables that jobs need to find CUDA's libraries and compiler.
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_HOME")
Record = Callable[[str, str, Any], None]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU unless it is named or asked for."""
    paths = [Path(word.partition("::")[0]).absolute() for word in config.args]
    named = any(path == HERE or HERE in path.parents for path in paths)
    if named or "gpu" in config.option.markexpr.split():
        return
    left = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _reserve_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reserve the GPU for a test marked ``gpu(alone=True)``; let the other tests share the GPU."""
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        yield
        return
    if not nvidia_smi.is_there():
        pytest.fail("no GPU here: nvidia-smi is not there", pytrace=False)
    with Path(tempfile.gettempdir(), f"dtslurm-gpu-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if mark.kwargs.get("alone") else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def gpu_python() -> Path:
    """A Python with the frameworks: ``$GPU_PYTHON``, or one whose environment is built for it."""
    if python := os.environ.get("GPU_PYTHON"):
        return Path(python)
    return environment("gpu", REQUIREMENTS, {"DS_BUILD_OPS": "0"})


@pytest.fixture
def record() -> Record:
    """Return what writes a value into docs/gpu.json: ``record(PART, NAME, VALUE)``."""
    return results.record


class GpuCli(Cli):
    """Submits to the GPU of this machine."""

    interpreter: Path

    def start(self, *words: str, **env: str) -> str:
        """Submit a script that uses the GPU; return the job."""
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | env
        set_env = [word for name, value in passed.items() for word in ("--env", f"{name}={value}")]
        return self.submit("--python", str(self.interpreter), "--gpus-per-node", "1", *set_env, *words)

    def train(self, *words: str, limit: float = 240, **env: str) -> tuple[str, dict[str, Any]]:
        """Submit a script that uses the GPU, wait for its end; return the job and its status."""
        job = self.start(*words, **env)
        return job, self.wait_for_end(job, limit=limit)["statuses"][0]

    def output(self, job: str) -> str:
        """Return what the ranks wrote."""
        logs = self.run_dir(job).logs(0)
        return "\n".join(path.read_text() for path in sorted(logs.glob("rank-*.log")))


@pytest.fixture
def gpu_cli(gpu_python: Path, tmp_path: Path) -> Iterator[GpuCli]:
    """The command line, on this machine without Slurm; each test has a queue of its own."""
    home = tmp_path / "home"
    home.mkdir()
    env = {
        "DTSLURM_RUN_ROOT": str(tmp_path / "runs"),
        "DTSLURM_LOCAL_STATE": str(tmp_path / "local"),
        "HOME": str(home),
    }
    with command_line("local", tmp_path, env) as tool:
        cli = GpuCli(tool.cluster, tool.folder, tool.env, tool.started)
        cli.interpreter = gpu_python
        yield cli


@pytest.fixture(autouse=True, scope="session")
def _record_machine() -> None:
    """Record the GPU and the CPUs of this machine."""
    if nvidia_smi.is_there():
        fields = ("name", "memory.total", "driver_version", "vbios_version", "compute_cap", "power.limit")
        results.record("machine", "gpu", nvidia_smi.ask(*fields)[0])
        results.record("machine", "cpus", os.cpu_count())
