"""``megatron``: torchrun with the variables and checks that Megatron-LM needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtslurm.launch.torchrun import Torchrun
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout

_PARALLEL_SIZE_OPTIONS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


class Megatron(Torchrun):
    """torchrun for Megatron-LM's training scripts."""

    name = "megatron"
    summary = "torchrun with Megatron-LM's settings"

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: parallel sizes that do not divide the ranks, or an unhandled early signal."""
        problems = super().check(spec, layout)
        sizes = {flag: _parse_size(_find_option_value(spec.args, flag)) for flag in _PARALLEL_SIZE_OPTIONS}
        model_size = 1
        for size in sizes.values():
            model_size *= size
        if layout.world_size % model_size:
            product = " x ".join(f"{flag[2:].split('-')[0]} {size}" for flag, size in sizes.items())
            problems.append(
                f"{layout.world_size} ranks cannot be divided into model replicas of {product} = {model_size}"
            )
        sent_signal = f"SIG{spec.signal}"
        handled_signal = _find_option_value(spec.args, "--exit-signal") or "SIGTERM"
        if (
            spec.signal_before is not None
            and "--exit-signal-handler" in spec.args
            and handled_signal != sent_signal
        ):
            problems.append(
                f"--exit-signal-handler waits for {handled_signal}, and --signal-before sends "
                f"{sent_signal}: give Megatron --exit-signal {sent_signal}, or remove --signal-before"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return the queue setting that Megatron's communication overlap relies on."""
        common = super().variables(spec, layout)
        if not layout.gpus_per_node:
            return common
        reason = "a single queue keeps the order in which Megatron overlaps communication and computation"
        return {**common, "CUDA_DEVICE_MAX_CONNECTIONS": Variable(value="1", why=reason)}


def _find_option_value(args: Sequence[str], flag: str) -> str | None:
    """Return the value of ``flag value`` or ``flag=value``. As in argparse, the last one counts."""
    value = None
    for index, word in enumerate(args):
        if word == flag and index + 1 < len(args):
            value = args[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _parse_size(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and int(text) else 1


launcher = Megatron()
