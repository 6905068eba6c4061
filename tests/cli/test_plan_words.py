"""The printed plan: totals, scaling curve, emitted configuration and measured rows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dtslurm.cli.printing import output
from dtslurm.config.job_files import jobs
from tests.cli.conftest import Run

COLUMNS = (
    "source,row_id,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu,gpus,tp,pp,cp,ep,vp,dp,"
    "zero_or_fsdp,micro_batch,global_batch,recompute,precision,tokens_per_s_per_gpu,tflops_per_gpu,mem_gib,"
    "notes,status\n"
)
SMALL = ("plan", "llama-3-8b", "--gpu", "H100-80GB", "-N", "2", "--gbs", "256")


def test_plan_computes_time_energy_and_price_of_all_tokens(invoke: Run) -> None:
    result = (*SMALL, "--tokens", "1e12")
    plain = invoke(*result, code=0).stdout
    [hours] = re.findall(r"^1e\+12 tokens: \S+ \(\S+ to \S+\), ([\d,]+) GPU-hours$", plain, re.MULTILINE)
    full = invoke(*result, "--price", "2", "--watts", "1000", code=0).stdout
    [energy, price] = re.findall(r"GPU-hours, ([\d,.]+) MWh, price ([\d,]+)$", full, re.MULTILINE)[0]
    known = int(hours.replace(",", ""))
    assert int(price.replace(",", "")) == pytest.approx(2 * known, abs=2)
    in_euros = invoke(*result, "--price", "2EUR", code=0).stdout
    assert re.search(rf"price {price} EUR$", in_euros, re.MULTILINE)
    assert json.loads(invoke(*result, "--price", "$ 2", "--json", code=0).stdout)["totals"]["currency"] == "$"
    assert float(energy.replace(",", "")) == pytest.approx(known / 1000, abs=0.1)


def test_plan_shows_the_active_parameters_of_a_mixture_of_experts(invoke: Run) -> None:
    shown = invoke("plan", "mixtral-8x7b", "--gpu", "H100-80GB", "-N", "4", code=0).stdout
    assert re.match(r"mixtral-8x7b: 46\.7 B parameters, 12\.9 B active; 4 x 8 H100", shown)


def test_the_scaling_curve_marks_node_counts_that_do_not_fit(invoke: Run) -> None:
    shown = invoke(
        "plan", "llama-3-70b", "--gpu", "H100-80GB", "-N", "4", "--gbs", "256", "--scaling", code=0
    ).stdout
    curve = shown[shown.index("scaling, with the same global batch:") :].splitlines()[1:]
    assert curve[0].split(maxsplit=2) == ["1", "nodes", "does not fit or divide"]
    assert re.match(r" +4 nodes  #{40} [\d,]+ tokens/s  \d+% MFU  tp=", curve[-1])
    document = json.loads(
        invoke(
            "plan", "llama-3-70b", "--gpu", "H100", "-N", "4", "--gbs", "256", "--scaling", "--json"
        ).stdout
    )
    assert [item["nodes"] for item in document["scaling"]] == [1, 2, 4]
    assert document["scaling"][0]["best"] is None


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "gpt2"])
def test_plan_explains_a_first_layout_that_is_not_the_fastest(invoke: Run, model: str) -> None:
    words = ("plan", model, "--gpu", "H100-80GB", "-N", "4", "--gbs", "256")
    candidates = json.loads(invoke(*words, "--json", code=0).stdout)["candidates"]
    times = [item["step_time_s"]["total"] for item in candidates]
    reason = rf"^why: +1 comes first though {times.index(min(times)) + 1} is [\d.]+% faster"
    assert (times[0] > min(times)) == bool(re.search(reason, invoke(*words).stdout, re.MULTILINE))


def test_the_bars_share_a_legend_and_have_a_scale(invoke: Run) -> None:
    shown = invoke("plan", "mixtral-8x7b", "--gpu", "H100-80GB", "-N", "4", code=0).stdout
    legend = shown[shown.index("  W weights") :].partition("\n\n")[0]
    marks = re.findall(r"(?:^ +|, )(\S) ", legend, re.MULTILINE)
    assert len(marks) == len(set(marks)), legend
    bars = re.findall(r"^(?:\d| ) ?\[(.*?)\]", shown, re.MULTILINE)
    assert set("".join(bars)) - {" "} <= set(marks)
    assert re.search(r"^   0 +\d+(\.\d)? +79\.\d GiB$", shown, re.MULTILINE)
    assert re.search(r"^   0 +[\d.]+ +[\d.]+ s$", shown, re.MULTILINE)


def test_emit_prints_only_the_configuration_to_stdout(invoke: Run, folder: Path) -> None:
    done = invoke(*SMALL, "--framework", "megatron", "--emit", "megatron", code=0)
    assert "--tensor-model-parallel-size" in done.stdout
    assert "why:" not in done.stdout
    invoke(*SMALL, "--framework", "megatron", "--emit", "megatron", "--plot", "p.svg", code=0)
    picture = (folder / "p.svg").read_text()
    assert picture.startswith("<svg")
    assert "1 nodes: " in picture
    assert "2 nodes: " in picture


@pytest.mark.parametrize("node_type", [(), ("--node-type", "h100x8")])
def test_an_emitted_job_file_names_the_planned_cluster(
    invoke: Run, folder: Path, node_type: tuple[str, ...]
) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "h100x8-ib", *node_type, "-N", "2", "--emit", "job")
    (folder / "job.yaml").write_text(invoke(*words, code=0).stdout)
    (folder / "pretrain_gpt.py").touch()
    loaded = jobs.load(folder / "job.yaml", {}, cwd=folder)
    assert loaded.job.cluster == "h100x8-ib"
    assert loaded.stages[0].work.node_type == (node_type[1] if node_type else None)
    assert "cluster:" not in invoke(*SMALL, "--emit", "job", code=0).stdout


def test_emit_and_json_cannot_be_combined(invoke: Run) -> None:
    assert "only one of them" in invoke(*SMALL, "--emit", "job", "--json", code=2).stderr


def test_plan_reports_an_unknown_node_type(invoke: Run) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "h100x8-ib", "--node-type", "nope")
    assert "--node-type nope: cluster h100x8-ib has no such type (" in invoke(*words, code=2).stderr


def test_emit_and_plot_are_refused_if_no_layout_fits(invoke: Run, folder: Path) -> None:
    large = ("plan", "llama-3-405b", "--gpu", "H100-80GB", "-N", "1", "--gbs", "64")
    assert (
        "no layout fits, so there is no configuration to print"
        in invoke(*large, "--emit", "torchrun", code=2).stderr
    )
    assert "no layout fits, so there is no plan to draw" in invoke(*large, "--plot", "p.svg", code=2).stderr
    assert not (folder / "p.svg").exists()


def test_plan_evaluate_prints_measured_and_predicted_values_side_by_side(invoke: Run, folder: Path) -> None:
    shape = "llama3-8b,8.03,32,4096,32,8,14336,128256,8192,H100"
    rows = [
        f"lab,1,{shape},8,1,1,2,1,1,4,ZeRO-1,1,128,none,bf16,9e3,,60,NeMo,ok\n",
        f"lab,2,{shape},8,1,1,2,1,1,4,ZeRO-1,1,128,none,bf16,,,,NeMo,ok\n",
        f"lab,3,{shape},8,3,1,1,1,1,8,none,1,8,none,bf16,100,,,,ok\n",
        f"other,4,{shape},8,1,1,1,1,1,8,none,1,8,none,bf16,,,,,oom\n",
    ]
    (folder / "rows.csv").write_text(COLUMNS + "".join(rows))
    shown = invoke("plan", "--evaluate", "rows.csv", code=0).stdout
    first, second, third, crashed, *_ = (re.split(r" {2,}", line) for line in shown.splitlines()[1:])
    assert first[:3] == ["1", "llama3-8b", "8"]
    assert re.fullmatch(r"[+-]\d+\.\d%", first[6])
    assert first[8] == "60.0"
    assert re.fullmatch(r"[+-]\d+\.\d%", first[9])
    assert (second[5:7], second[8:]) == (["-", "-"], ["-", "-"])
    assert third[3:] == ["tp·pp·cp = 3 does not divide 8 GPUs"]
    assert crashed[0] == "4"
    sums = {
        line.split()[0]: line.split()
        for line in shown.splitlines()
        if line.startswith(("lab", "other", "all"))
    }
    assert (sums["lab"][1:3], sums["all"][1]) == (["3", "1"], "4")
    assert sums["other"][-2] == "1/1"
    result = json.loads(invoke("plan", "--evaluate", "rows.csv", "--json", code=0).stdout)["rows"]
    assert [row.get("reason") is None for row in result] == [True, True, False, True]


def test_calibration_accepts_a_run_with_only_step_times_or_only_memory(invoke: Run, folder: Path) -> None:
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "small.yaml").write_text("extends: h100x8-ib\n")
    path = folder / "runs" / "train-1"
    (path / "logs" / "0").mkdir(parents=True)
    (path / "metrics" / "0").mkdir(parents=True)
    (path / "metrics" / "0" / "train.jsonl").write_text('{"step_time_s": 2.5}\n')
    known = {"token": "a", "cluster": "small", "name": "train", "run_dir": str(path), "phase": "submitted"}
    (path / "job.json").write_text(json.dumps({"schema": 1, "created_at": 1.0, "world_size": 8, **known}))
    words = (
        "plan",
        "llama-3-8b",
        "--cluster",
        "small",
        "--layout",
        "dp=8,mbs=1,gbs=64,zero=1,recompute=full",
    )
    steps = invoke(*words, "--calibrate", str(path), code=0).stdout
    assert re.fullmatch(r"step: 2\.5 s measured, [\d.]+ s predicted\n", steps)
    (path / "metrics" / "0" / "train.jsonl").write_text('{"memory_gib": 50}\n')
    memory = invoke(*words, "--calibrate", str(path), code=0).stdout
    assert re.fullmatch(r"memory: 50\.0 GiB measured, [\d.]+ GiB predicted\n", memory)


@pytest.mark.parametrize(
    ("nodes", "words", "message"),
    [
        (
            "a: {cpus: 4}",
            (),
            "the profile of site does not determine the GPUs to plan for; name a GPU, as in --gpu H100-80GB",
        ),
        (
            "a: {gpus: {model: A100, count: 8}}\n  b: {gpus: {model: H100, count: 4}}",
            (),
            "the profile of site does not determine the GPUs to plan for; --node-type accepts a, b",
        ),
        (
            "a: {gpus: {model: Voodoo2, count: 8}}",
            (),
            "unknown GPU 'Voodoo2' in the profile; name a known GPU with --gpu",
        ),
        (
            "a: {gpus: {model: A100, count: 8}}",
            ("--gpus-per-node", "9"),
            "--gpus-per-node 9: a node of site has 8 GPUs; valid: 1 to 8",
        ),
        (
            "a: {gpus: {model: A100, count: 8}}",
            ("-N", "17"),
            "--nodes 17: site allows a job at most 16; valid: 1 to 16",
        ),
    ],
)
def test_plan_refuses_gpus_and_nodes_that_the_cluster_does_not_have(
    invoke: Run, folder: Path, nodes: str, words: tuple[str, ...], message: str
) -> None:
    write_cluster(folder, nodes)
    done = invoke("plan", "llama-3-8b", "--cluster", "site", *words, code=2)
    assert message in done.stderr
    assert done.stdout == ""


def test_the_gpu_memory_of_the_profile_is_used(invoke: Run, folder: Path) -> None:
    write_cluster(folder, "a: {gpus: {model: A100, count: 8, memory: 20G}}")
    words = ("plan", "gpt2", "--cluster", "site", "--node-type", "a", "--json")
    machine = json.loads(invoke(*words, code=0).stdout)["machine"]
    assert machine["memory_gib"] == pytest.approx(19.7)


def write_cluster(folder: Path, nodes: str) -> None:
    path = folder / "cluster_profiles" / "site.yaml"
    path.parent.mkdir()
    path.write_text(f"name: site\nscheduler: slurm\nslurm: {{max_nodes: 16}}\nnode_types:\n  {nodes}\n")


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_breaks_lines_only_between_words_and_layouts(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    words = ("plan", "deepseek-v3", "--gpu", "H100-80GB", "-N", "64")
    plain = invoke(*words, code=0).stdout
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = invoke(*words, code=0).stdout.splitlines()
    assert max(map(len, lines)) <= width
    parts = set(re.split(r"[\s,]+", plain))
    assert not [part for part in re.split(r"[\s,]+", "\n".join(lines)) if part not in parts]


def test_plan_on_cluster_local_uses_the_local_gpus(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *-L*) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)';;\n"
        "  *) echo 'NVIDIA H100 80GB HBM3, 81559';;\n"
        "esac\n"
    )
    smi.chmod(0o755)
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": [] if path == "/dev" else real(path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown = invoke("plan", "llama-3.2-1b", "--cluster", "local", "--framework", "fsdp", code=0).stdout
    assert "; 1 x 1 H100-80-SXM; " in shown
