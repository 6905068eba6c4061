"""``llamafactory``: LLaMA-Factory's training from a YAML or JSON file, under torchrun."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.launch.torchrun import Torchrun
from dtslurm.model.jobs.job import JobSpec, TaskLayout

_CONFIGS = (".yaml", ".yml", ".json")


class LlamaFactory(Torchrun):
    """torchrun of the module that ``llamafactory-cli train`` would start with a torchrun of its own.

    ``llamafactory-cli`` takes no further torchrun options, splits arguments at spaces and leaves its ranks
    running when it gets SIGTERM.
    """

    name = "llamafactory"
    summary = "LLaMA-Factory by its YAML file, under torchrun"
    configs = _CONFIGS

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: the script must be a configuration file."""
        problems = super().check(spec, layout)
        if spec.module or not spec.script.endswith(_CONFIGS):
            problems.append(
                f"launcher llamafactory needs a configuration file ({', '.join(_CONFIGS)}) instead "
                f"of a script, not {spec.script}"
            )
        return problems

    def training(self, spec: JobSpec) -> JobSpec:
        """Return the job that runs LLaMA-Factory's module on the configuration file."""
        return replace(spec, script="llamafactory.launcher", module=True, args=(spec.script, *spec.args))


launcher = LlamaFactory()
