"""``torchtitan``: torchtitan's training from a TOML file or its own arguments, under torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtslurm.launch.torchrun import Torchrun
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout

_TRAIN_MODULE = "torchtitan.train"


class TorchTitan(Torchrun):
    """torchrun of torchtitan's module.

    ``CONFIG.toml`` is passed as ``--job.config_file``. Newer torchtitan versions have no such files; use the
    module and its arguments, ``-m torchtitan.train --module llama3 --config llama3_8b``.
    """

    name = "torchtitan"
    summary = "torchtitan by its TOML file or its own words, under torchrun"
    configs = (".toml",)

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: the script must be a configuration file, a Python file or a module."""
        problems = super().check(spec, layout)
        if not spec.module and not spec.script.endswith((".toml", ".py")):
            problems.append(
                f"launcher torchtitan needs a .toml configuration, or -m {_TRAIN_MODULE}, not {spec.script}"
            )
        return problems

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return the allocator setting of torchtitan's own start script."""
        common = super().variables(spec, layout)
        if not layout.gpus_per_node:
            return common
        allocator_setting = Variable(
            value="expandable_segments:True", why="reduces the memory that is lost to fragmentation"
        )
        return {**common, "PYTORCH_ALLOC_CONF": allocator_setting}

    def training(self, spec: JobSpec) -> JobSpec:
        """Return the job that runs torchtitan's module on the configuration file."""
        if spec.module or not spec.script.endswith(".toml"):
            return spec
        return replace(
            spec, script=_TRAIN_MODULE, module=True, args=("--job.config_file", spec.script, *spec.args)
        )


launcher = TorchTitan()
