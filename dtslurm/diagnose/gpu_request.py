"""Recognizes code that failed because the job requested no GPU, whatever the error message is."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.diagnose.failure_context import FailureContext
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict

_WITHOUT_GPU = {"invalid-device", "cpu-build", "driver-mismatch"}


def with_gpu_request(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict, with the missing GPU request as its cause if the job requested no GPU."""
    if context.facts.gpus_per_node != 0 or verdict.cause not in _WITHOUT_GPU:
        return verdict
    cpu_build = verdict.cause == "cpu-build"
    build_note = ", and the installed PyTorch is a build without CUDA" if cpu_build else ""
    install = " and install a CUDA build of PyTorch in the environment of the job" if cpu_build else ""
    request_line = EvidenceLine(
        rank=None, file="job.json", line=None, text="the job requested 0 GPUs per node"
    )
    return replace(
        verdict,
        cause="no-gpu-requested",
        summary=f"the code uses a GPU, but the job requested none{build_note}",
        blame="user",
        advice=f"submit again with --gpus-per-node N{install}, or let the code use the CPU where "
        "torch.cuda.is_available() is False",
        evidence=(*verdict.evidence, request_line),
    )
