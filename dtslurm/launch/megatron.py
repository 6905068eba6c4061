"""``megatron``: torchrun with what Megatron-LM wants set and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtslurm.launch.torchrun import Torchrun
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout

_PARALLEL = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


class Megatron(Torchrun):
    """torchrun for Megatron-LM's training scripts."""

    name = "megatron"
    summary = "torchrun with Megatron-LM's settings"

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: ranks that the parallel sizes do not divide, a signal nobody listens to."""
        problems = super().check(spec, layout)
        sizes = {flag: _whole(_value(spec.args, flag)) for flag in _PARALLEL}
        model = 1
        for size in sizes.values():
            model *= size
        if layout.world_size % model:
            product = " x ".join(f"{flag[2:].split('-')[0]} {size}" for flag, size in sizes.items())
            problems.append(
                f"{layout.world_size} ranks cannot be divided into model replicas of {product} = {model}"
            )
        wanted = f"SIG{spec.signal}"
        heard = _value(spec.args, "--exit-signal") or "SIGTERM"
        if spec.signal_before is not None and "--exit-signal-handler" in spec.args and heard != wanted:
            problems.append(
                f"--exit-signal-handler waits for {heard}, and --signal-before sends {wanted}: "
                f"give Megatron --exit-signal {wanted}, or leave --signal-before out"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return the queue setting that Megatron's overlap relies on."""
        common = super().variables(spec, layout)
        if not layout.gpus_per_node:
            return common
        why = "one queue keeps the order in which Megatron overlaps communication with computing"
        return {**common, "CUDA_DEVICE_MAX_CONNECTIONS": Variable(value="1", why=why)}


def _value(args: Sequence[str], flag: str) -> str | None:
    """Return the value of ``flag value`` or ``flag=value``; the last one counts, as for argparse."""
    found = None
    for place, word in enumerate(args):
        if word == flag and place + 1 < len(args):
            found = args[place + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and int(text) else 1


launcher = Megatron()
