"""``torchtitan``: torchtitan's training by a TOML file or by its own words, under torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtslurm.launch.torchrun import Torchrun
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout

_TRAIN = "torchtitan.train"


class TorchTitan(Torchrun):
    """torchrun of torchtitan's module.

    ``CONFIG.toml`` is passed as ``--job.config_file``. Newer versions have no such files: there, give the
    module and its words, ``-m torchtitan.train --module llama3 --config llama3_8b``.
    """

    name = "torchtitan"
    summary = "torchtitan by its TOML file or its own words, under torchrun"
    configs = (".toml",)

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: the script must be a configuration or code that trains."""
        problems = super().check(spec, layout)
        if not spec.module and not spec.script.endswith((".toml", ".py")):
            problems.append(
                f"launcher torchtitan wants a .toml configuration, or -m {_TRAIN}, not {spec.script}"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return what torchtitan's own start script sets."""
        common = super().variables(spec, layout)
        if not layout.gpus_per_node:
            return common
        value = Variable(value="expandable_segments:True", why="less memory lost to fragmentation")
        return {**common, "PYTORCH_ALLOC_CONF": value}

    def training(self, spec: JobSpec) -> JobSpec:
        """Return the job that runs torchtitan's module on the configuration."""
        if spec.module or not spec.script.endswith(".toml"):
            return spec
        return replace(spec, script=_TRAIN, module=True, args=("--job.config_file", spec.script, *spec.args))


launcher = TorchTitan()
