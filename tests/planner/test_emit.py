"""Configurations emitted for each framework."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtslurm.config.job_files import jobs
from dtslurm.launch import registry as launchers
from dtslurm.planner import emit, hardware, search
from dtslurm.planner.emit.job import segment
from dtslurm.planner.layout import Layout, parse_layout
from tests.planner.conftest import SHIPPED, training_task


def parse_toml(text: str) -> dict[str, dict[str, Any]]:
    """Parse the emitted subset of TOML: sections of plain values (tomllib needs Python 3.11)."""
    values: dict[str, dict[str, Any]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            values[section] = {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            values[section][key] = json.loads(value)
    return values


def assigned_values(text: str) -> dict[str, dict[str, Any]]:
    """Return the values that an emitted module assigns, by section."""
    values: dict[str, dict[str, Any]] = {}
    for section, key, value in re.findall(
        r"^    config\.(training|parallelism)\.(\w+) = (.*)$", text, re.MULTILINE
    ):
        values.setdefault(section, {})[key] = ast.literal_eval(value)
    ast.parse(text)
    return values


FRAMEWORK = {
    "torchrun": "fsdp",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "accelerate": "fsdp",
    "job": "megatron",
    **dict.fromkeys(("torchtitan", "torchtitan-0.2", "torchtitan-0.3"), "torchtitan"),
}


def megatron_flags(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {flag: value for flag, _, value in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("form", emit.FORMS)
@pytest.mark.parametrize(("model", "count"), [("llama-3-8b", 2), ("gpt2", 1), ("llama-3-70b", 16)])
def test_the_best_layout_can_be_emitted_in_every_form(form: str, model: str, count: int) -> None:
    asked = training_task(model, count, gbs=512, framework=FRAMEWORK[form])
    best = search.search(asked, SHIPPED).ranked[0].layout
    assert emit.check(form, asked, best) == []
    text = emit.emit(form, asked, best)
    assert text.endswith("\n")
    if form == "deepspeed":
        values = json.loads(text)
        ranks = asked.machine.gpus // best.tp
        steps = values["gradient_accumulation_steps"]
        assert values["train_batch_size"] == values["train_micro_batch_size_per_gpu"] * steps * ranks == 512
    elif form.startswith("torchtitan"):
        degrees = (parse_toml(text) if form == "torchtitan-0.2" else assigned_values(text))["parallelism"]
        product = 1
        for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
                     "context_parallel"):  # fmt: skip
            product *= degrees[f"{name}_degree"]
        assert product == asked.machine.gpus
    elif form == "accelerate":
        assert yaml.safe_load(text)["num_processes"] == asked.machine.gpus


def test_megatron_arguments_contain_the_model_and_the_parallelism() -> None:
    layout = Layout(tp=8, pp=8, dp=4, cp=2, vp=8, gbs=64, zero=1, recompute="full")
    asked = training_task("llama-3-405b", 64, seq_len=8192, gbs=64)
    words = megatron_flags(emit.emit("megatron", asked, layout))
    assert words["--tensor-model-parallel-size"] == "8"
    assert words["--context-parallel-size"] == "2"
    assert words["--num-layers"] == "126"
    assert "--account-for-loss-in-pipeline-split" in words  # 126 = 128 - 2
    assert words["--num-layers-per-virtual-pipeline-stage"] == "2"
    assert words["--num-query-groups"] == "8"
    assert words["--recompute-granularity"] == "full"
    assert {"--swiglu", "--sequence-parallel", "--use-distributed-optimizer"} <= set(words)


def test_megatron_arguments_describe_latent_attention_and_experts() -> None:
    words = megatron_flags(
        emit.emit("megatron", training_task("deepseek-v3", 8), Layout(dp=64, ep=64, gbs=256, zero=1))
    )
    assert words["--kv-lora-rank"] == "512"
    assert words["--qk-head-dim"] == "128"
    assert words["--num-experts"] == "256"
    assert words["--expert-model-parallel-size"] == "64"
    assert words["--moe-shared-expert-intermediate-size"] == "2048"


def test_hybrid_sharding_is_emitted_with_both_dimensions() -> None:
    layout = Layout(dp=16, gbs=16, zero=3, shard=8)
    for titan in (
        parse_toml(emit.emit("torchtitan-0.2", training_task("llama-3-8b", 2), layout))["parallelism"],
        assigned_values(emit.emit("torchtitan", training_task("llama-3-8b", 2), layout))["parallelism"],
    ):
        assert (titan["data_parallel_replicate_degree"], titan["data_parallel_shard_degree"]) == (2, 8)
    text = emit.emit("torchrun", training_task("llama-3-8b", 2), layout)
    assert "init_device_mesh('cuda', (2, 8,)" in text
    assert '"replicate", "shard"' in text
    deep = json.loads(emit.emit("deepspeed", training_task("llama-3-8b", 2), layout))
    assert deep["zero_optimization"]["zero_hpz_partition_size"] == 8


@pytest.mark.parametrize(
    ("form", "layout", "said"),
    [
        ("deepspeed", Layout(pp=2), "no word for pipeline parallelism: pp=2"),
        ("torchrun", Layout(cp=2), "no word for context parallelism: cp=2"),
        ("torchrun", Layout(dp=2, gbs=2, zero=1), "zero=0 or 3 is valid"),
        ("megatron", Layout(dp=2, gbs=2, zero=3), "zero=0 or 1 is valid"),
        ("megatron", Layout(schedule="zbv"), "1f1b is valid"),
        ("torchtitan", Layout(dp=2, gbs=2, zero=2), "zero=0 or 3 is valid"),
        ("accelerate", Layout(ep=2), "no word for expert parallelism"),
        *(
            (form, Layout(recompute="mlp"), "cannot recompute the MLPs alone")
            for form in ("torchtitan", "torchrun", "deepspeed", "accelerate")
        ),
    ],
)
def test_layouts_that_a_framework_cannot_run_are_reported(form: str, layout: Layout, said: str) -> None:
    assert said in "\n".join(emit.check(form, training_task("mixtral-8x7b", 1), layout))


def test_the_recomputation_of_mlps_is_a_module_of_megatron() -> None:
    layout = parse_layout("tp=8,mbs=1,gbs=8,zero=1,recompute=mlp")
    flags = megatron_flags(emit.emit("megatron", training_task("llama-3-70b", 1), layout))
    assert flags["--recompute-granularity"] == "selective"
    assert flags["--recompute-modules"] == "mlp"


@pytest.mark.parametrize("framework", ["fsdp", "megatron", "nemo", "deepspeed", "torchtitan"])
def test_an_emitted_job_file_matches_the_framework(framework: str, tmp_path: Path) -> None:
    asked = training_task("llama-3-8b", 2, framework=framework)
    best = search.search(asked, SHIPPED).ranked[0].layout
    path = tmp_path / "job.yaml"
    path.write_text(emit.emit("job", asked, best))
    path.chmod(0o644)
    job = jobs.load(path, {}, cwd=tmp_path).job
    assert (job.nodes, job.gpus_per_node) == (2, 8)
    assert job.launcher in launchers.names()
    if job.launcher == "torchtitan":
        assert (job.script, job.module) == ("torchtitan.train", True)
        assert job.args == ("--module", "planned", "--config", "planned")
    if job.launcher == "megatron":
        assert job.args[job.args.index("--global-batch-size") + 1] == str(best.gbs)


def test_a_job_file_for_a_framework_without_launcher_is_refused() -> None:
    assert "jax" in emit.check("job", training_task("llama-3-8b", 1, framework="jax"), Layout())[0]


def test_offloading_is_emitted_in_the_deepspeed_configuration() -> None:
    layout = replace(Layout(dp=8, gbs=8, zero=2), offload=True)
    values = json.loads(emit.emit("deepspeed", training_task("llama-3-8b", 1, framework="deepspeed"), layout))
    assert values["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_megatron_configurations_refuse_encoder_models() -> None:
    assert "describe decoders" in emit.check("megatron", training_task("t5-base", 1), Layout())[0]


@pytest.mark.parametrize("form", ["megatron", "torchtitan"])
@pytest.mark.parametrize("model", ["bert-base", "t5-base", "vit-b-16", "resnet-50"])
def test_decoder_frameworks_refuse_other_models(form: str, model: str) -> None:
    asked = training_task(model, 1, gbs=64, framework="fsdp")
    result = emit.check(form, asked, Layout(dp=8, gbs=64))
    assert any(f"decoders, which {model} is not" in line for line in result)


def test_the_torchtitan_configuration_disables_cuda_graphs_with_a_pipeline() -> None:
    layout = Layout(dp=2, pp=4, mbs=1, gbs=16, recompute="none")
    text = emit.emit("torchtitan", training_task("llama-3-70b", 1), layout)
    assert assigned_values(text)["training"]["disable_cuda_graphs"] is True
    assert "config.activation_checkpoint = None" in text


def test_a_model_unknown_to_torchtitan_is_emitted_with_a_comment() -> None:
    text = emit.emit("torchtitan", training_task("gpt2", 1), Layout(dp=8, gbs=8))
    assert "# register the flavor gpt2 with torchtitan first" in text
    assert 'config.model_spec = model_registry("gpt2")' in text


@pytest.mark.parametrize(
    ("nodes", "layout", "size"),
    [
        (64, "tp=1,pp=1,dp=256,ep=32", 8),
        (64, "tp=8,pp=4,dp=8", 2),
        (64, "tp=4,pp=4,dp=16", None),  # a node is a rack's anyway
        (18, "tp=8,dp=9", 2),
        (18, "tp=1,dp=72,ep=12", 3),
        (36, "tp=8,dp=18,ep=6,cp=1", 2),
        (16, "tp=8,cp=2,dp=4", 4),
        (5, "tp=4,dp=5,ep=1", None),
        (7, "tp=2,dp=14", None),  # no two nodes need to be near
    ],
)
def test_the_segment_size_keeps_communicating_groups_in_a_rack(
    nodes: int, layout: str, size: int | None
) -> None:
    assert segment(machine_of("GB200", nodes, 4), parse_layout(f"{layout},mbs=1,gbs=5040")) == size


def test_nodes_of_eight_gpus_need_no_segment() -> None:
    assert segment(machine_of("H100-80GB", 16, 8), parse_layout("tp=8,cp=2,dp=8,mbs=1,gbs=512")) is None


def machine_of(gpu: str, nodes: int, per_node: int) -> hardware.Machine:
    result = hardware.find_gpu(gpu)
    assert result is not None
    return hardware.machine(result, nodes, gpus_per_node=per_node)
