"""torchtitan's configuration: a Python module since 0.3, TOML in earlier versions.

source: torchtitan 0.3.0, torchtitan/config/configs.py and trainer.py; 0.2.2, torchtitan/config/job_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dtslurm.planner.emit.common import only, summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble"}
PYTHON_SINCE = (0, 3)
MODULE = "planned"  # name of the emitted module and of its function
_RECOMPUTE_CLASSES = {"selective": "SelectiveAC", "full": "FullAC"}
# Base configuration, in 0.3, for flavors that have no configuration of their own.
_BASE_CONFIGS = {("qwen3", "8B"): "qwen3_14b"}
_FLAVORS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
}


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why torchtitan cannot run a layout."""
    problems = only(layout, "torchtitan", "tp", "pp", "cp", "ep")
    if not task.model.is_decoder:
        problems.append(f"torchtitan trains decoders, which {task.model.name} is not")
    if layout.zero in {1, 2}:
        problems.append(f"torchtitan shards everything or nothing: zero={layout.zero}; zero=0 or 3 is valid")
    if layout.shards % layout.cp and layout.zero == 3:
        problems.append(f"shard={layout.shards} is no multiple of cp={layout.cp}")
    if task.precision == "fp16":
        problems.append("torchtitan trains in bfloat16, not in fp16")
    if layout.offload:
        problems.append("torchtitan offloads parameters as well; the layout's offload=1 has no word there")
    return problems


def emit_toml(task: TrainingTask, layout: Layout) -> str:
    """Return the TOML configuration for torchtitan 0.2 and earlier."""
    name, flavor = _find_flavor(task)
    recompute: dict[str, object] = {"mode": layout.recompute}
    if layout.recompute == "selective":
        recompute["selective_ac_option"] = "op"
    sections: dict[str, Mapping[str, object]] = {
        "model": {"name": name, "flavor": flavor},
        "training": _training_values(task, layout),
        "parallelism": _parallelism_values(task, layout),
        "activation_checkpoint": recompute,
        "compile": {"enable": True},
    }
    lines = [f"# {summary(task, layout)}", "# for torchtitan before 0.3", *_flavor_comment(task)]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines[:-1]) + "\n"


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the Python module for torchtitan 0.3 and later."""
    name, flavor = _find_flavor(task)
    flavor_config = f"{name}_{flavor.lower().replace('-', '_').replace('.', '_')}"
    base_config = _BASE_CONFIGS.get(
        (name, flavor), flavor_config if task.model.name in _FLAVORS else "llama3_8b"
    )
    training = _training_values(task, layout)
    if layout.pp > 1 or layout.ep > 1:
        training["disable_cuda_graphs"] = True  # torchtitan rejects CUDA graphs with these
    recompute_class = _RECOMPUTE_CLASSES.get(layout.recompute)
    needs_model_spec = base_config != flavor_config
    lines = [
        f"# {summary(task, layout)}",
        f"# for torchtitan 0.3 and later, as {MODULE}.py: --module {MODULE} --config {MODULE}",
        *_flavor_comment(task),
        *(
            [f"from torchtitan.distributed.activation_checkpoint import {recompute_class}"]
            if recompute_class
            else []
        ),
        *([f"from torchtitan.models.{name} import model_registry"] if needs_model_spec else []),
        f"from torchtitan.models.{name}.config_registry import {base_config}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        f"def {MODULE}() -> Trainer.Config:",
        f"    config = {base_config}()",
        *([f"    config.model_spec = model_registry({json.dumps(flavor)})"] if needs_model_spec else []),
    ]
    for section, values in (("training", training), ("parallelism", _parallelism_values(task, layout))):
        lines += [f"    config.{section}.{key} = {_python_literal(value)}" for key, value in values.items()]
    lines += [
        f"    config.activation_checkpoint = {f'{recompute_class}.Config()' if recompute_class else None}",
        "    config.compile.enable = True",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _python_literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _find_flavor(task: TrainingTask) -> tuple[str, str]:
    return _FLAVORS.get(task.model.name, ("llama3", task.model.name))


def _flavor_comment(task: TrainingTask) -> list[str]:
    name = task.model.name
    return [] if name in _FLAVORS else [f"# register the flavor {name} with torchtitan first"]


def _training_values(task: TrainingTask, layout: Layout) -> dict[str, object]:
    return {
        # with a pipeline, torchtitan splits the local batch into micro-batches itself
        "local_batch_size": layout.mbs if layout.pp == 1 else layout.gbs // layout.dp,
        "global_batch_size": layout.gbs,
        "seq_len": task.seq_len,
        "mixed_precision_param": "float32" if task.precision == "fp32" else "bfloat16",
    }


def _parallelism_values(task: TrainingTask, layout: Layout) -> dict[str, object]:
    shards = layout.shards // layout.cp if layout.zero == 3 else 1
    values: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.pp > 1:
        schedule = "Interleaved1F1B" if layout.vp > 1 else _SCHEDULES[layout.schedule]
        values["pipeline_parallel_schedule"] = schedule
        values["pipeline_parallel_microbatch_size"] = layout.mbs
    if layout.vp > 1:
        layers = -(-task.model.layers // (layout.pp * layout.vp))
        values["pipeline_parallel_layers_per_stage"] = layers
    return values
