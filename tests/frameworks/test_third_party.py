"""Programs that come with the frameworks run unmodified on two nodes, and their ranks train together.

What the packages from PyPI hold, and what is run of it here:

* Accelerate: the test scripts that need no GPU and no download. ``test_script`` has a check for exactly two
  processes, so it gets two nodes of one rank; ``test_sync`` gets two nodes of two. ``test_ops`` starts from a
  ``PartialState``, which uses a group with GPUs only (docs/launchers.md). ``test_distributed_data_loop``
  joins uneven inputs, which Accelerate does with GPUs only: without them its ranks wait for ever.
* Lightning: no program, only classes (``lightning.pytorch.demos``). ``BoringModel`` and ``BoringDataModule``
  are trained by the lines that Lightning documents for ``LightningCLI``. The other demos download their data.
* DeepSpeed 0.19.8: no program that trains. ``run_all_gather``, the measurement of
  ``deepspeed/compile/profilers/comm_profile.py``, runs as it is, on small sizes: the file's own main program
  names NCCL and gathers gigabytes. DeepSpeed's accelerator for CPUs has no events: ``Event`` stands in.
  Not run: ``ds_bench`` imports ``benchmarks``, which the package lacks; ``data_analyzer.py`` fails with more
  than one rank (``torch.empty`` gets a type of NumPy's); ``sequence/test_autosp.py`` has no process group but
  mocks; ``ds_report`` is one process.
* torchtitan: the trainer with its debug model, by its own words. The package lacks the TOML files, the
  tokenizer and the data of its tests: ``write_titan.py`` makes a tokenizer and data, and
  ``cpu/sitecustomize.py`` stands in for a GPU.
* submitit: the tests of its own executors (for pytest), and no examples. ``TorchDistributedEnvironment``,
  by which its documentation starts a process group, is called here in a job of dtslurm's executor. The
  variables are set there before: it needs ``overwrite=True``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import Cli
from tests.frameworks.conftest import SCRIPTS, Activated
from tests.frameworks.test_torch_family import everything, extensions, torch_python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1500)]

TOGETHER = {
    "test_script": r"^Num processes: 2$",
    "test_sync": r"Test Distributed `no_sync` context manager",
}
RANKS_PER_NODE = {"test_script": 1, "test_sync": 2}
LIGHTNING_CLI = """\
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

LightningCLI(BoringModel, BoringDataModule)
"""
ALL_GATHER = """\
import time

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.profilers.comm_profile import run_all_gather


class Event:
    def __init__(self, enable_timing):
        self.time = 0.0

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


type(get_accelerator()).Event = Event
deepspeed.init_distributed()
print("bytes", *(size for size, seconds in run_all_gather("cpu", torch.bfloat16, 8)))
torch.distributed.destroy_process_group()  # else a thread of gloo's may abort the end
"""
TITAN = """\
--model.name=llama3 --model.flavor=debugmodel --model.hf_assets_path=assets --training.dataset=c4_test
--training.steps=6 --training.seq_len=64 --training.local_batch_size=2
--training.mixed_precision_param=float32
--parallelism.data_parallel_shard_degree=1 --parallelism.data_parallel_replicate_degree=4
--optimizer.lr=3e-3 --lr_scheduler.warmup_steps=1 --activation_checkpoint.mode=none
--metrics.log_freq=1 --metrics.disable_color_printing --job.dump_folder=out
"""


@pytest.fixture
def cli(activated: Activated, torch_python: Path) -> Cli:  # noqa: F811 - the fixture
    return activated(torch_python)


def packages(cli: Cli) -> Path:
    """Return where the frameworks are installed."""
    return next(Path(cli.env["VIRTUAL_ENV"]).glob("lib/python*/site-packages"))


def run_to_its_end(cli: Cli, ranks_per_node: int, *words: str) -> RunDir:
    """Submit a program on two nodes as a user would; return its run, in which every rank ended with 0."""
    job = cli.submit("-N2", "--ntasks-per-node", str(ranks_per_node), *words)
    status = cli.wait_for_end(job, limit=400)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    ends = [(record.rank, record.exit_code) for record in run.ranks(0)]
    assert ends == [(rank, 0) for rank in range(2 * ranks_per_node)]
    assert len({record.host for record in run.ranks(0)}) == 2
    assert '"evidence"' not in (run.path / "events.jsonl").read_text()  # of ranks that train apart
    return run


def log(run: RunDir, rank: int) -> str:
    return (run.logs(0) / f"rank-{rank}.log").read_text()


@pytest.mark.sampled(1, "programs")
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "srun"])
@pytest.mark.parametrize("script", TOGETHER)
def test_accelerate_test_scripts_run(cli: Cli, script: str, launcher: str) -> None:
    path = packages(cli) / "accelerate/test_utils/scripts" / f"{script}.py"
    run = run_to_its_end(cli, RANKS_PER_NODE[script], "-l", launcher, str(path))
    for rank in (0, RANKS_PER_NODE[script]):  # the first rank of each node prints
        assert re.search(TOGETHER[script], log(run, rank), re.MULTILINE)


@pytest.mark.sampled(1, "programs")
@pytest.mark.parametrize("launcher", ["lightning", "torchrun", "srun"])
def test_lightning_cli_trains_the_boring_model(cli: Cli, launcher: str) -> None:
    script = cli.script(LIGHTNING_CLI, "boring.py")
    words = ["fit", "--trainer.num_nodes=2", "--trainer.devices=2", "--trainer.max_epochs=2"]
    run = run_to_its_end(cli, 2, "-l", launcher, script, *words, "--trainer.logger=false")
    for rank in range(4):
        assert f"GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" in log(run, rank)
    assert "Starting with 4 processes" in log(run, 0)
    # Of 64 samples each of four ranks has 16: two epochs are 32 steps, and 128 for a rank by itself.
    assert [path.name for path in cli.folder.rglob("*.ckpt")] == ["epoch=1-step=32.ckpt"]
    assert len([*cli.folder.rglob("config.yaml")]) == 1


@pytest.mark.sampled(1, "programs")
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "srun"])
def test_deepspeed_all_gather_benchmark_runs(cli: Cli, launcher: str) -> None:
    folder = extensions(Path(cli.env["VIRTUAL_ENV"]))
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": folder}
    words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    run = run_to_its_end(cli, 2, "-l", launcher, *words, cli.script(ALL_GATHER, "gather.py"))
    for rank in range(4):  # of 2 to 128 numbers, two bytes each: what four ranks cannot share is left out
        assert "\nbytes 0 8 16 32 64 128 256\n" in log(run, rank)


@pytest.mark.sampled(1, "programs")
def test_torchtitan_debug_model_trains(cli: Cli) -> None:
    python = Path(cli.env["VIRTUAL_ENV"], "bin", "python")
    argv = [str(python), str(SCRIPTS / "write_titan.py")]
    done = subprocess.run(argv, cwd=cli.folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": cli.folder / "hub", "PYTHONPATH": SCRIPTS / "cpu"}
    words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    run = run_to_its_end(cli, 2, "-l", "torchtitan", *words, "-m", "torchtitan.train", *TITAN.split())
    losses = [re.findall(r"step: +(\d+) +loss: +([\d.]+)", log(run, rank)) for rank in range(4)]
    assert [step for step, _ in losses[0]] == ["1", "2", "3", "4", "5", "6"]
    assert losses == [losses[0]] * 4  # the loss is the mean of all ranks
    assert "dp_replicate=4" in log(run, 0)


@pytest.mark.sampled(1, "programs")
def test_submitit_torch_distributed_environment_works(cli: Cli, torch_python: Path) -> None:  # noqa: F811
    cli.script(
        """
        import submitit
        import torch

        def count_ranks():
            place = submitit.helpers.TorchDistributedEnvironment().export(overwrite=True)
            torch.distributed.init_process_group("gloo")
            value = torch.ones(1)
            torch.distributed.all_reduce(value)
            torch.distributed.destroy_process_group()
            return place.rank, place.world_size, place.local_rank, value.item()
        """,
        "counting.py",
    )
    result = cli.python(
        f"""
        import json, sys
        import submitit
        from counting import count_ranks

        ex = submitit.AutoExecutor("logs", cluster="dtslurm", dtslurm_profile=sys.argv[1])
        ex.update_parameters(
            nodes=2, tasks_per_node=2, timeout_min=5, dtslurm_python={str(torch_python)!r}
        )
        print(json.dumps({{"ranks": ex.submit(count_ranks).results()}}))
        """
    )
    assert result["ranks"] == [[rank, 4, rank % 2, 4.0] for rank in range(4)]
