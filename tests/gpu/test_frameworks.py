"""Each framework trains on the GPU, and runs the configuration that ``plan --emit`` prints."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.frameworks.conftest import SCRIPTS as CPU_SCRIPTS
from tests.gpu.conftest import SCRIPTS, GpuCli, Record

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# framework: launcher, script and its words
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("torchrun", ("train.py", "ddp")),
    "fsdp2": ("torchrun", ("train.py", "fsdp2")),
    "deepspeed": ("deepspeed", ("train.py", "deepspeed")),
    "accelerate": ("accelerate", ("train.py", "accelerate")),
    "lightning": ("lightning", ("train.py", "lightning")),
    "jax": ("jax", ("train_jax.py",)),
}


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step:? +\d+ +loss:? +([\d.]+)", text)]


@pytest.mark.parametrize("framework", CASES)
def test_framework_trains_on_the_gpu(gpu_cli: GpuCli, record: Record, framework: str) -> None:
    launcher, (script, *words) = CASES[framework]
    job, status = gpu_cli.train("-l", launcher, str(SCRIPTS / script), *words)
    output = gpu_cli.output(job)
    match = re.search(r"^version (\S+) on (\S+) world (\d+)$", output, re.MULTILINE)
    seen = losses(output)
    record(
        "frameworks",
        framework,
        {
            "launcher": launcher,
            "state": status["state"],
            "version": match[1] if match else None,
            "device": match[2] if match else None,
            "first_loss": seen[0] if seen else None,
            "last_loss": seen[-1] if seen else None,
        },
    )
    assert status["state"] == "COMPLETED", output
    assert match
    assert match[2] in {"cuda:0", "gpu:0"}
    assert match[3] == "1"
    assert len(seen) == 30
    assert seen[-1] < 0.5 * seen[0]


# ---- what `plan --emit` prints is run as it was printed ----

PLANNED = "llama-3.2-1b --gpu H100 -N 1 --gpus-per-node 1 -s 2048 --layout dp=1,mbs=2,gbs=4,zero=3"


def emit(cli: GpuCli, form: str) -> str:
    return cli("plan", *PLANNED.split(), "--emit", form).stdout


def test_accelerate_runs_the_emitted_configuration(gpu_cli: GpuCli, record: Record) -> None:
    config = gpu_cli.folder / "planned.yaml"
    config.write_text(emit(gpu_cli, "accelerate"))
    option = ("--launcher-option", f"config_file={config}")
    job, status = gpu_cli.train("-l", "accelerate", *option, str(SCRIPTS / "train_llama.py"), "accelerate")
    finish(gpu_cli, record, "accelerate", job, status["state"])


def test_deepspeed_runs_the_emitted_configuration(gpu_cli: GpuCli, record: Record) -> None:
    config = gpu_cli.folder / "planned.json"
    config.write_text(emit(gpu_cli, "deepspeed"))
    job, status = gpu_cli.train("-l", "deepspeed", str(SCRIPTS / "train_llama.py"), "deepspeed", str(config))
    finish(gpu_cli, record, "deepspeed", job, status["state"])


def test_torchrun_runs_the_emitted_lines_and_options(gpu_cli: GpuCli, record: Record) -> None:
    """Insert the printed lines into the script, and pass the printed options to it."""
    printed = emit(gpu_cli, "torchrun").splitlines()
    lines = [line.removeprefix("# ") for line in printed if re.match(r"# (mesh =|fully_shard)", line)]
    command = " ".join(line.rstrip("\\") for line in printed if not line.startswith("#"))
    program = (SCRIPTS / "train_llama.py").read_text()
    before, mark, after = program.partition("    # the lines that plan printed\n")
    assert mark
    pasted = before + "".join(f"    {line}\n" for line in lines) + after
    gpu_cli.script(pasted, "train.py")
    arguments = command.partition("train.py")[2].split()
    job, status = gpu_cli.train("-l", "torchrun", "train.py", "torchrun", *arguments)
    finish(gpu_cli, record, "torchrun", job, status["state"])


def finish(cli: GpuCli, record: Record, form: str, job: str, state: str) -> None:
    output = cli.output(job)
    seen = losses(output)
    record("emitted", form, {"state": state, "first_loss": seen[:1], "last_loss": seen[-1:]})
    assert state == "COMPLETED", output
    assert seen[-1] < seen[0]


@pytest.mark.gpu(alone=True)
def test_torchtitan_runs_the_emitted_configuration(gpu_cli: GpuCli, record: Record) -> None:
    """titan.py registers the flavor, as the emitted file demands; write_titan.py makes tokenizer and data."""
    argv = [str(gpu_cli.interpreter), str(CPU_SCRIPTS / "write_titan.py")]
    done = subprocess.run(argv, cwd=gpu_cli.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (gpu_cli.folder / "planned.toml").write_text(emit(gpu_cli, "torchtitan-0.2"))
    (gpu_cli.folder / "titan.py").write_text((SCRIPTS / "titan.py").read_text())
    words = (
        "--job.config_file=planned.toml --model.hf_assets_path=assets --training.dataset=c4_test"
        " --training.steps=12 --metrics.log_freq=1 --metrics.disable_color_printing --job.dump_folder=out"
        " --optimizer.lr=1e-3 --lr_scheduler.warmup_steps=1"
    )
    job, status = gpu_cli.train("-l", "torchtitan", "titan.py", *words.split(), HF_HUB_OFFLINE="1")
    output = gpu_cli.output(job)
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"tps: ([\d,]+)", output)]
    memory = [float(size) for size in re.findall(r"memory: +([\d.]+)GiB", output)]
    record("emitted", "torchtitan-0.2 speed", {"tokens_per_s": rates[4:], "reserved_gib": memory[-1:]})
    finish(gpu_cli, record, "torchtitan-0.2", job, status["state"])
