"""``dtslurm plan``: output and refused arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from dtslurm.planner.intervals import tie_factor
from tests.cli.conftest import Run

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"
SMALL = ("plan", "llama-3-8b", "--gpu", "H100-80GB", "-N", "2", "--gbs", "256")


def documented_schema() -> dict[str, object]:
    match = re.search(r"<!-- schema: begin -->\n```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert match
    parsed: dict[str, object] = json.loads(match[1])
    return parsed


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        ("plan", "resnet-50", "--gpu", "A100", "-N", "2"),
        ("plan", "t5-base", "--gpu", "V100-32GB", "--tokens", "1e9", "--price", "2", "--watts", "500"),
        ("plan", "mixtral-8x7b", "--cluster", "h100x8-ib", "-N", "4", "--scaling"),
        (*SMALL[:-2], "--layout", "tp=2,dp=8,mbs=1,gbs=256,zero=1,recompute=full"),
    ],
)
def test_plan_json_matches_the_documented_schema(run: Run, words: tuple[str, ...]) -> None:
    document = json.loads(run(*words, "--json").stdout)
    jsonschema.validate(document, documented_schema())
    assert document["candidates"]
    for item in document["candidates"]:
        for name in ("memory_gib", "step_time_s"):
            assert sum(item[name]["terms"].values()) == pytest.approx(item[name]["total"])
        layout = item["layout"]
        machine = document["machine"]
        gpus = machine["nodes"] * machine["gpus_per_node"]
        assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == gpus


def test_plan_prints_layouts_reasons_and_bars(run: Run) -> None:
    done = run(*SMALL, "--tokens", "1e12")
    assert re.search(r"^1 +tp=\d", done.stdout, re.MULTILINE)
    assert re.search(r"^1 \[W+G+", done.stdout, re.MULTILINE)
    [bar] = re.findall(r"^  \[(.*)\]$", done.stdout, re.MULTILINE)
    assert len(bar) == 72
    assert bar.startswith("mm")
    for word in ("why:", "otherwise:", "GPU-hours", "m matrix products"):
        assert word in done.stdout
    assert "assumed:" in done.stderr


def test_plan_gives_intervals_of_times_and_names_ties(run: Run) -> None:
    document = json.loads(run(*SMALL, "--tokens", "1e12", "--json").stdout)
    factors = set()
    for item in document["candidates"]:
        step = item["step_time_s"]
        assert step["low"] < step["total"] < step["high"]
        factors.add(round(step["high"] / step["total"], 6))
    assert len(factors) == 1  # all are predictions of one class
    totals = document["totals"]
    assert totals["low"] < totals["seconds"] < totals["high"]
    first = document["candidates"][0]["step_time_s"]["total"]
    second = document["candidates"][1]["step_time_s"]["total"]
    assert (2 in document["ties"]) is (second / first < tie_factor(mixture=False))
    shown = run(*SMALL).stdout
    low, high = (document["candidates"][0]["step_time_s"][end] for end in ("low", "high"))
    assert f" s ({low:.1f}-{high:.1f})" in shown
    assert "cannot be distinguished from 1" in shown
    assert "would decide" in shown


def test_a_mixture_of_experts_or_a_new_gpu_has_a_wider_interval(run: Run) -> None:
    def width(*words: str) -> float:
        step = json.loads(run("plan", *words, "--json").stdout)["candidates"][0]["step_time_s"]
        return float(step["high"] / step["low"])

    dense = width("llama-3-8b", "--gpu", "H100-80GB", "-N", "2")
    assert width("mixtral-8x7b", "--gpu", "H100-80GB", "-N", "4") > dense
    assert width("llama-3-8b", "--gpu", "L40S", "-N", "8", "--gpus-per-node", "8") >= dense


def test_gpus_without_bf16_are_planned_with_fp16(run: Run) -> None:
    done = run("plan", "gpt2", "--gpu", "V100-32GB", "--json")
    assert json.loads(done.stdout)["precision"] == "fp16"


def test_plan_mentions_offloading_if_no_layout_fits(run: Run) -> None:
    words = ("plan", "llama-2-7b", "--gpu", "A100-40GB", "--gpus-per-node", "2", "--gbs", "64")
    assert "optimizer states in host memory" in run(*words, "--framework", "deepspeed", code=2).stdout


def test_plan_prints_if_one_gpu_is_enough(run: Run) -> None:
    assert "one GPU is enough" in run("plan", "gpt2", "--gpu", "A100", "--gbs", "256").stdout


def test_plan_reports_the_number_of_nodes_that_a_model_needs(run: Run) -> None:
    done = run("plan", "llama-3-405b", "--gpu", "H100-80GB", "-N", "4", "--gbs", "512", code=2)
    assert "no layout fits" in done.stdout
    assert re.search(r"it fits from about \d+ nodes on", done.stdout)
    document = json.loads(
        run("plan", "llama-3-405b", "--gpu", "H100", "-N", "4", "--gbs", "512", "--json", code=2).stdout
    )
    assert document["candidates"] == []
    assert document["unfit"]
    jsonschema.validate(document, documented_schema())


def test_a_layout_that_does_not_fit_is_estimated(run: Run) -> None:
    done = run("plan", "llama-3-70b", "--gpu", "H100", "--layout", "dp=8,gbs=8,zero=1", code=2)
    assert "it needs" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a model"),
        (("llama-3-9b",), "did you mean 'llama-3-8b'"),
        (("llama-3-8b", "--gpu", "Voodoo2"), "unknown GPU 'Voodoo2'; known GPUs:"),
        (("llama-3-8b", "-N", "0"), "--nodes should be 1 to 100,000, not 0"),
        (("llama-3-8b", "-N", "-3"), "--nodes should be 1 to 100,000, not -3"),
        (("llama-3-8b", "-N", "99999999"), "--nodes should be 1 to 100,000"),
        (("llama-3-8b", "--gpus-per-node", "0"), "--gpus-per-node should be 1 to 128, not 0"),
        (("llama-3-8b", "-s", "-1"), "--seq-len should be 1 to"),
        (("llama-3-8b", "--gbs", "0"), "--gbs should be 1 to"),
        (("llama-3-8b", "--tokens", "nan"), "--tokens should be more than 0"),
        (("llama-3-8b", "--price", "-1"), "--price should be more than 0"),
        (("llama-3-8b", "--price", "cheap"), "--price 'cheap' should be a number"),
        (("llama-3-8b", "--price", "1.2.3"), "--price '1.2.3' should be a number"),
        (("llama-3-8b", "--framework", "keras"), "--framework should be one of"),
        (("llama-3-8b", "--precision", "int3"), "--precision should be one of"),
        (("llama-3-8b", "--gpu", "A100", "--precision", "fp8"), "A100-80-SXM has no 8-bit matrix units"),
        (("llama-3-8b", "--emit", "keras"), "--emit should be one of"),
        (
            ("llama-3-8b", "--layout", "tp=3,dp=1,gbs=1"),
            "tp=3 does not divide the 32 attention heads; valid: 1, 2",
        ),
        (("llama-3-8b", "--layout", "tp=4,dp=1,gbs=1"), "there are 8; dp=2 would fit"),
        (("llama-3-8b", "--layout", "pp=5,dp=1,gbs=1"), "pp=5 divides neither the 32 layers nor 34"),
        (("llama-3-8b", "--layout", "pp=64,dp=1,gbs=1"), "pp=64 is more than the 32 layers; valid: 1 to 32"),
        (
            ("llama-3-8b", "--layout", "dp=8,mbs=3,gbs=100"),
            "gbs=100 is not a multiple of mbs·dp = 24; gbs=120",
        ),
        (("llama-3-8b", "--layout", "dp=8,ep=4,gbs=8"), "llama-3-8b has none; ep=1 is valid"),
        (
            ("mixtral-8x7b", "--layout", "dp=8,ep=3,gbs=8"),
            "ep=3 does not divide the 8 experts; valid: 1, 2, 4, 8",
        ),
        (("llama-3-8b", "--layout", "dp=8,gbs=8,vp=2"), "vp=2 interleaves a pipeline, and pp=1 has none"),
        (("llama-3-8b", "--layout", "tp=-1"), "tp should be a whole number from 1"),
        (("llama-3-8b", "--layout", "tp=1e3"), "not '1e3'"),
        (("llama-3-8b", "--layout", "zero=7"), "zero should be one of 0, 1, 2, 3"),
        (("llama-3-8b", "--layout", "tp=2,tp=4"), "tp is given twice"),
        (("llama-3-8b", "--layout", "xp=2"), "'xp' is not part of a layout"),
        (("llama-3-8b", "--layout", "fast"), "should read key=value"),
        (("llama-3-8b", "--layout", ""), "the layout is empty"),
        (("llama-3-8b", "--layout", "dp=8,cp=1,shard=3,zero=3,gbs=8"), "shard=3 does not divide dp·cp = 8"),
        (("resnet-50", "--layout", "tp=8,gbs=8"), "only dp can be more than 1"),
        (("t5-base", "--layout", "pp=8,gbs=8"), "pipelines over an encoder and a decoder"),
    ],
)
def test_plan_refuses_invalid_arguments(run: Run, words: tuple[str, ...], said: str) -> None:
    machine = () if "--gpu" in words else ("--gpu", "H100-80GB")
    done = run("plan", *words, *machine, code=2)
    assert said in done.stderr
    assert done.stdout == ""


def test_plan_reports_all_problems_together(run: Run) -> None:
    done = run("plan", "llama-9", "--gpu", "x", "-N0", "--gbs", "-1", "--layout", "tp=0,yy=1", code=2)
    assert "6 problems" in done.stderr


def test_plan_refuses_more_nodes_or_gpus_than_the_profile_has(run: Run, folder: Path) -> None:
    profiles = folder / "cluster_profiles"
    profiles.mkdir()
    (profiles / "small.yaml").write_text("extends: h100x8-ib\nslurm:\n  max_nodes: 4\n")
    words = ("plan", "llama-3-8b", "--cluster", "small", "-N", "5", "--gpus-per-node", "16")
    done = run(*words, code=2)
    assert "--nodes 5: small allows a job at most 4; valid: 1 to 4" in done.stderr
    assert "--gpus-per-node 16: a node of small has 8 GPUs; valid: 1 to 8" in done.stderr


def test_plan_on_a_cluster_without_gpus_asks_for_a_gpu(run: Run) -> None:
    assert "name a GPU, as in --gpu" in run("plan", "gpt2", "--cluster", "local", code=2).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json:1: is not JSON"),
        ("[]", "one JSON object"),
        ('{"model_type": "rwkv9"}', "'rwkv9' is not known; known are bart, bert"),
        ('{"model_type": "llama", "hidden_size": -1}', "hidden_size should be 1 to"),
        ("\udcff", "is not a text file"),
        ("[" * 100000, "config.json"),
    ],
)
def test_an_invalid_model_config_is_reported(run: Run, folder: Path, text: str, said: str) -> None:
    path = folder / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = run("plan", "--model-config", "config.json", "--gpu", "H100", code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_config_is_reported(run: Run) -> None:
    done = run("plan", "--model-config", "none.json", "--gpu", "H100", code=2)
    assert "none.json: no such file or directory" in done.stderr


def test_plan_accepts_a_checkpoint_folder_as_model(run: Run, folder: Path) -> None:
    made = folder / "checkpoint"
    made.mkdir()
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (made / "config.json").write_text(json.dumps(config))
    document = json.loads(run("plan", "./checkpoint", "--gpu", "A100", "--json").stdout)
    assert document["model"]["parameters"] == 124_439_808


def test_plan_draws_an_svg_file(run: Run, folder: Path) -> None:
    run(*SMALL, "--scaling", "--plot", "plan.svg")
    root = ET.parse(folder / "plan.svg").getroot()
    assert root.tag.endswith("svg")
    words = " ".join(text for text in root.itertext())
    for word in ("memory of the fullest GPU", "time of one step", "2 nodes", "activations"):
        assert word in words


def test_a_plot_in_a_missing_folder_is_reported(run: Run) -> None:
    assert "no such file or directory" in run(*SMALL, "--plot", "nowhere/plan.svg", code=5).stderr


ROWS = """source,row_id,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu,gpus,tp,pp,cp,ep,\
vp,dp,zero_or_fsdp,micro_batch,global_batch,recompute,precision,tokens_per_s_per_gpu,tflops_per_gpu,mem_gib,\
notes,status
lab,1,llama3-8b,8.03,32,4096,32,8,14336,128256,8192,H100,8,1,1,2,1,1,4,ZeRO-1,1,128,none,bf16,9e3,,,NeMo,ok
lab,2,llama3-70b,70.6,80,8192,64,8,28672,128256,8192,H100-80-SXM,8,1,1,1,1,1,8,none,1,8,none,bf16,,,,,oom
lab,3,mystery,,,,,,,,8192,H100-80-SXM,8,1,1,1,1,1,8,none,1,8,none,bf16,100,,,,ok
lab,4,llama3-8b,8.03,32,4096,32,8,14336,128256,8192,Abacus,8,1,1,1,1,1,8,none,1,8,none,bf16,100,,,,ok
"""


def test_plan_evaluate_predicts_measured_rows(run: Run, folder: Path) -> None:
    (folder / "rows.csv").write_text(ROWS)
    document = json.loads(run("plan", "--evaluate", "rows.csv", "--json").stdout)
    result, crashed, unknown, alien = document["rows"]
    assert result["source"] == "lab"
    assert result["predicted"]["fits"] is True
    assert (
        result["predicted"]["low"] < result["predicted"]["tokens_per_s_per_gpu"] < result["predicted"]["high"]
    )
    assert result["predicted"]["tokens_per_s_per_gpu"] == pytest.approx(10500, rel=0.25)
    assert result["measured"]["tokens_per_s_per_gpu"] == 9000
    assert crashed["predicted"]["fits"] is False
    assert "hidden is not given" in unknown["reason"]
    assert "'Abacus' is not known" in alien["reason"]
    text = run("plan", "--evaluate", "rows.csv").stdout
    assert re.search(r"^lab +4 +2 ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "does not name column gpu, gpus"), ("a,b\n1,2\n", "does not name column"), (None, "no such file")],
)
def test_plan_evaluate_refuses_an_unusable_table(
    run: Run, folder: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (folder / "rows.csv").write_text(content)
    assert said in run("plan", "--evaluate", "rows.csv", code=2).stderr


@pytest.mark.parametrize(
    ("version", "head"), [("0.2.2", "[model]"), ("0.3.0", "def planned()"), (None, "def planned()")]
)
def test_the_torchtitan_output_matches_the_installed_version(
    version: str | None, head: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    if version:
        (packages / f"torchtitan-{version}.dist-info").mkdir()
        metadata = packages / f"torchtitan-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    words = ("plan", "llama-3-8b", "--gpu", "H100", "--layout", "dp=8,mbs=1,gbs=8,zero=3", "--emit")
    assert head in run(*words, "torchtitan", code=0).stdout
    assert "[model]" in run(*words, "torchtitan-0.2", code=0).stdout
