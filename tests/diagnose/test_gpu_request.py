"""GPU code in a job without GPUs, and with a build of PyTorch that has no CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.failures import Left, diagnose_run

# As torch 2.13 prints them: a CPU build, then a CUDA build on a node without a GPU.
CPU_BUILD = [
    "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
    "AssertionError: Torch not compiled with CUDA enabled",
    "RuntimeError: Distributed package doesn't have NCCL built in",
    "RuntimeError: Tried to instantiate dummy base class Event",
]
NO_GPU = [
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "RuntimeError: No CUDA GPUs are available",
    "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
]


def failed_rank(error: str) -> Left:
    stack = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in main\n    go()\n'
    return Left(stack + error, code=1)


@pytest.mark.parametrize("error", [*CPU_BUILD, *NO_GPU])
def test_gpu_code_in_a_job_without_gpus_is_diagnosed(tmp_path: Path, error: str) -> None:
    verdict = diagnose_run(tmp_path, failed_rank(error), failed_rank(error), gpus_per_node=0)
    assert (verdict.cause, verdict.blame) == ("no-gpu-requested", "user")
    assert verdict.summary.startswith("the code uses a GPU, but the job requested none")
    assert ("build without CUDA" in verdict.summary) == (error in CPU_BUILD)
    assert "--gpus-per-node" in verdict.advice
    assert error in [line.text for line in verdict.evidence]


@pytest.mark.parametrize("error", CPU_BUILD)
@pytest.mark.parametrize("gpus", [None, 8])
def test_a_cpu_build_of_torch_in_a_job_with_gpus_is_diagnosed(
    tmp_path: Path, error: str, gpus: int | None
) -> None:
    verdict = diagnose_run(tmp_path, failed_rank(error), failed_rank(error), gpus_per_node=gpus)
    assert (verdict.cause, verdict.blame) == ("cpu-build", "user")
    assert "torch.version.cuda" in verdict.advice


def test_other_errors_of_a_job_without_gpus_keep_their_cause(tmp_path: Path) -> None:
    assert (
        diagnose_run(tmp_path, failed_rank("ValueError: no such shard"), gpus_per_node=0).cause
        == "python-exception"
    )
