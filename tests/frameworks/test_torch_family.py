"""Launchers of the torch family train on two nodes of the suite's Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from signal import SIGKILL

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e import test_elastic as elastic
from tests.e2e.conftest import Cli
from tests.frameworks.conftest import SCRIPTS, Activated
from tests.frameworks.envs import environment

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUIREMENTS = (
    "torch==2.13.0",
    "numpy",
    "accelerate==1.15.0",
    "lightning==2.6.6",
    "jsonargparse[signatures]",  # LightningCLI
    "deepspeed==0.19.8",
    "ninja",
    "nvidia-resiliency-ext==0.4.1",
    "submitit",  # functions are run by it
    "torchtitan==0.2.2",
    "triton",  # torchtitan imports it, and a torch for CPUs comes without
)
STALE_S = 600.0  # a lock of torch's that is older belongs to a process that was killed as it compiled
WARM_UP = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()"

# launcher, its options, what it runs
CASES = {
    "deepspeed": ("deepspeed", (), "train_deepspeed.py"),
    "deepspeed-nossh": ("deepspeed", ("--launcher-option", "form=nossh"), "train_deepspeed.py"),
    "accelerate": ("accelerate", (), "train_accelerate.py"),
    "lightning": ("lightning", (), "train_lightning.py"),
    "megatron": ("megatron", (), "train_ddp.py"),
    "nvrx": ("nvrx", (), "train_ddp.py"),
}
# Cases that are seen to train only: the rest of them is proved by those above.
DEEPSPEED_BY = {
    "deepspeed-torchrun": ("deepspeed", ("--launcher-option", "form=torchrun"), "train_deepspeed.py"),
    "deepspeed-srun": ("deepspeed", ("--launcher-option", "form=srun"), "train_deepspeed.py"),
}
TRAINED = {**CASES, **DEEPSPEED_BY, "torchrun-fsdp": ("torchrun", (), "train_fsdp.py")}
STAGES = {"deepspeed-torchrun": "2", "deepspeed-srun": "3"}


def extensions(environment: Path) -> Path:
    """Return where an environment's torch keeps what it compiles: no other version's may be there."""
    return environment / "torch_extensions"


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """A Python with all these frameworks, and the operation that DeepSpeed compiles compiled."""
    python = environment("torch", REQUIREMENTS, {"DS_BUILD_OPS": "0"})
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    folder = extensions(python.parent.parent)
    for lock in folder.glob("*/lock"):  # all who load the extension would wait for it without an end
        if time.time() - lock.stat().st_mtime > STALE_S:
            lock.unlink(missing_ok=True)
    env = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [str(python), "-c", WARM_UP], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture
def cli(activated: Activated, torch_python: Path) -> Cli:
    return activated(torch_python)


def submit(cli: Cli, case: str, *words: str, signal: bool = False, **env: str) -> str:
    launcher, options, script = TRAINED[case]
    if case in STAGES:
        env["STAGE"] = STAGES[case]
    env = {
        "TORCH_EXTENSIONS_DIR": str(extensions(Path(cli.env["VIRTUAL_ENV"]))),
        "DS_ACCELERATOR": "cpu",
        **env,
    }
    words += tuple(word for name, value in env.items() for word in ("--env", f"{name}={value}"))
    if signal:
        words += ("--signal-before", "60")
    return cli.submit(
        "-N2", "--ntasks-per-node", "2", "-l", launcher, *options, *words, str(SCRIPTS / script)
    )


def logs(run: RunDir) -> dict[int, str]:
    return {rank: (run.logs(0) / f"rank-{rank}.log").read_text() for rank in range(4)}


def everything(run: RunDir) -> str:
    files = [*sorted((run.path / "logs").rglob("*.log"))]
    return "\n".join(f"==> {path.name}\n{path.read_text()[-3000:]}" for path in files)


@pytest.mark.proves("case", "runs", "logs")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", TRAINED)
def test_launcher_trains_the_model(cli: Cli, case: str) -> None:
    job = submit(cli, case)
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    records = run.ranks(0)
    assert [(record.rank, record.exit_code) for record in records] == [(rank, 0) for rank in range(4)]
    assert [record.node_rank for record in records] == [0, 0, 1, 1]
    assert len({record.host for record in records}) == 2
    for rank, text in logs(run).items():
        assert f"world 4 rank {rank}" in text
        losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.MULTILINE)]
        assert len(losses) == 20
        assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
        assert '"evidence"' not in (run.path / "events.jsonl").read_text()  # of ranks that train apart
        if case == "torchrun-fsdp":
            assert "holds 64 of 256" in text
        if "train_deepspeed.py" in TRAINED[case]:
            assert f"ZeRO {STAGES.get(case, '1')}" in text
        if STAGES.get(case) == "3":
            assert re.findall(r"^parameters held (\d+)$", text, re.MULTILINE) == ["3"]  # of 9, in 4 parts


@pytest.mark.sampled(1, "each its own")
def test_accelerate_receives_unknown_launcher_options(cli: Cli) -> None:
    script = cli.script("""
        import os
        from accelerate import Accelerator
        print("role", os.environ["ROLE_NAME"], Accelerator(cpu=True).num_processes)
    """)
    options = ("role=trainer", "gradient_accumulation_steps=4", "tee=3")
    words = [word for option in options for word in ("--launcher-option", option)]
    job = cli.submit("--ntasks-per-node", "2", "-l", "accelerate", *words, script)
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    assert "role trainer 2" in (run.logs(0) / "rank-1.log").read_text()


@pytest.mark.proves("case", "exit")
@pytest.mark.sampled(1, "each its own")
@pytest.mark.parametrize(("fault", "code"), [("exit", 42), ("kill", 137)])
@pytest.mark.parametrize("case", CASES)
def test_exit_code_of_the_failed_rank_becomes_the_exit_code_of_the_job(
    cli: Cli, case: str, fault: str, code: int
) -> None:
    job = submit(cli, case, FAULT=fault)
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    run = cli.run_dir(job)
    assert (status["state"], status["exit_code"]) == ("FAILED", code), everything(run)
    assert run.first_failure(0) == (3, code)
    assert {record.rank: record.exit_code for record in run.ranks(0)}[3] == code
    assert f"fault {fault}" in logs(run)[3]


@pytest.mark.sampled(1, "each its own")
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed", "nvrx"])
def test_function_runs_as_ranks_of_the_launcher(cli: Cli, launcher: str, torch_python: Path) -> None:
    cli.script(
        """
        import submitit
        import torch

        def place_and_sum():
            here = submitit.JobEnvironment()
            torch.distributed.init_process_group("gloo")
            value = torch.ones(1) * (torch.distributed.get_rank() + 1)
            torch.distributed.all_reduce(value)
            torch.distributed.destroy_process_group()
            return here.global_rank, here.num_tasks, here.local_rank, here.node, value.item()
        """,
        "ranks.py",
    )
    result = cli.python(
        f"""
        import json, sys
        import submitit
        from ranks import place_and_sum

        ex = submitit.AutoExecutor("logs", cluster="dtslurm", dtslurm_profile=sys.argv[1])
        ex.update_parameters(
            nodes=2, tasks_per_node=2, timeout_min=5, dtslurm_launcher={launcher!r},
            dtslurm_python={str(torch_python)!r}, dtslurm_env=["DS_ACCELERATOR=cpu"],
        )
        print(json.dumps({{"ranks": ex.submit(place_and_sum).results()}}))
        """
    )
    assert result["ranks"] == [[rank, 4, rank % 2, rank // 2, 10.0] for rank in range(4)]


@pytest.mark.sampled(1, "each its own")
@pytest.mark.parametrize("case", ["deepspeed", "deepspeed-nossh"])
def test_killed_launcher_fails_the_job(cli: Cli, case: str) -> None:
    job = submit(cli, case, FAULT="launcher")
    status = cli.wait_for_end(job, limit=240)["statuses"][0]
    run = cli.run_dir(job)
    for record in run.ranks(0):  # without cgroups Slurm does not find the orphans of a killed launcher
        command = Path(f"/proc/{record.pid}/cmdline")
        if command.exists() and str(SCRIPTS).encode() in command.read_bytes():
            os.kill(record.pid, SIGKILL)
    assert status["state"] == "FAILED", everything(run)


@pytest.mark.sampled(1, "each its own")
def test_cancel_leaves_deepspeed_ranks_time_to_save(cli: Cli) -> None:
    script = cli.script(
        """
        import signal, sys, time
        def save(number, frame):
            signal.signal(number, signal.SIG_IGN)  # it comes from Slurm and from the launcher
            time.sleep(0.2)  # of the 10 s that Slurm leaves all of them (KillWait)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("listening", flush=True)
        time.sleep(100)
        """
    )
    job = cli.submit(
        "-N2", "--ntasks-per-node", "2", "-l", "deepspeed", "--env", "DS_ACCELERATOR=cpu", script
    )
    run = cli.run_dir(job)
    wait_for_log(cli, run, "listening")
    cli("cancel", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    cli.wait_until(lambda: all("saved" in text for text in logs(run).values()), limit=20)
    cli.wait_until(lambda: all(record.exit_code == 0 for record in run.ranks(0)), limit=20)
    ends = [event["time"] for event in run.events() if event["event"] == "ended"]
    saved = max((run.logs(0) / f"rank-{rank}.log").stat().st_mtime for rank in range(4))
    # Else the launcher was gone first, and cgroups would have killed. On a busy machine there is no time left
    # to record the end.
    assert all(saved < end + 1 for end in ends)


@pytest.mark.proves("case", "signal")
@pytest.mark.sampled(1, "each its own")
@pytest.mark.parametrize("case", [case for case in CASES if case != "lightning"])
def test_early_signal_reaches_every_rank_of_the_launcher(cli: Cli, case: str) -> None:
    job = submit(cli, case, signal=True, LISTEN="USR2")
    run = cli.run_dir(job)
    wait_for_log(cli, run, "listening")
    subprocess.run(["scancel", "-s", "USR2", job], env={**os.environ, **cli.env}, check=True)
    status = cli.wait_for_end(job, limit=120)["statuses"][0]
    assert status["state"] == "COMPLETED", everything(run)
    assert all("heard ['SIGUSR2']" in text for text in logs(run).values())


@pytest.mark.sampled(1, "each its own")
@pytest.mark.proves("lightning", "signal")
def test_lightning_saves_at_the_early_signal_without_a_requeue(cli: Cli) -> None:
    job = submit(cli, "lightning", signal=True, LISTEN="USR1")
    run = cli.run_dir(job)
    wait_for_log(cli, run, "listening")
    subprocess.run(["scancel", "-s", "USR1", job], env={**os.environ, **cli.env}, check=True)
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert status["state"] == "COMPLETED", everything(run)
    assert (run.path / "checkpoints" / "hpc_ckpt_1.ckpt").exists()
    texts = logs(run)
    assert all("saving at" in text for text in texts.values())
    assert "not requeued: Lightning has saved" in texts[0]
    assert not run.logs(1).exists()


@pytest.fixture(scope="session")
def llama_python() -> Path:
    """A Python with LLaMA-Factory, which imports torchaudio by name and fails on PyPI's torchvision."""
    python = environment("llamafactory", ("torch==2.13.0", "numpy", "llamafactory==0.9.5"))
    argv = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"]
    subprocess.run(argv, check=True, capture_output=True)
    for packages in python.parent.parent.glob("lib/python*/site-packages"):
        (packages / "torchaudio.py").touch()
    return python


@pytest.mark.sampled(1, "each its own")
@pytest.mark.proves("llamafactory", "runs", "exit", "logs")
def test_llamafactory_trains_from_its_yaml_file(activated: Activated, llama_python: Path) -> None:
    cli = activated(llama_python)
    argv = [str(llama_python), str(SCRIPTS / "write_llama.py")]
    done = subprocess.run(argv, cwd=cli.folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    words = ["-N2", "--ntasks-per-node", "2", "-l", "llamafactory", "--env", "HF_HUB_OFFLINE=1"]

    job = cli.submit(*words, "sft.yaml")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    assert [(record.rank, record.exit_code) for record in run.ranks(0)] == [(rank, 0) for rank in range(4)]
    texts = logs(run)
    for rank, text in texts.items():
        assert f"Process rank: {rank}, world size: 4" in text
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", texts[0])]
    assert losses[-1] < 0.7 * losses[0]
    assert (cli.folder / "out" / "model.safetensors").exists()

    config = cli.folder / "sft.yaml"
    config.write_text(config.read_text().replace("sums", "absent"))
    job = cli.submit(*words, "sft.yaml")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert (status["state"], status["exit_code"]) == ("FAILED", 1), everything(run)
    failed = run.first_failure(0)
    assert failed is not None
    assert "absent" in logs(run)[failed[0]]


@pytest.mark.sampled(1, "each its own")
def test_nvrx_continues_without_a_lost_node(cli: Cli) -> None:
    options = ("nnodes=1:2", "max_restarts=2")
    python = str(Path(cli.env["VIRTUAL_ENV"], "bin", "python"))
    job, run = elastic.submit(cli, "node", *options, launcher="nvrx", python=python)
    elastic.check_survived(cli, job, run)


@pytest.mark.sampled(1, "each its own")
@pytest.mark.proves("torchtitan", "runs", "exit", "logs")
def test_torchtitan_trains_from_its_toml_file(cli: Cli) -> None:
    python = Path(cli.env["VIRTUAL_ENV"], "bin", "python")
    argv = [str(python), str(SCRIPTS / "write_titan.py")]
    done = subprocess.run(argv, cwd=cli.folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    offline = ["--env", "HF_HUB_OFFLINE=1", "--env", f"HF_HOME={cli.folder / 'hub'}"]
    words = ["-N2", "--ntasks-per-node", "2", "-l", "torchtitan", *offline]
    words += ["--env", f"PYTHONPATH={SCRIPTS / 'cpu'}"]

    job = cli.submit(*words, "debug.toml")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    assert [(record.rank, record.exit_code) for record in run.ranks(0)] == [(rank, 0) for rank in range(4)]
    for text in logs(run).values():
        losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", text)]
        assert len(losses) == 12
        assert losses[-1] < 0.7 * losses[0]

    job = cli.submit(*words, "debug.toml", "--model.flavor", "absent")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert (status["state"], status["exit_code"]) == ("FAILED", 1), everything(run)
    failed = run.first_failure(0)
    assert failed is not None
    assert "absent" in logs(run)[failed[0]]


def wait_for_log(cli: Cli, run: RunDir, text: str) -> None:
    paths = [run.logs(0) / f"rank-{rank}.log" for rank in range(4)]
    cli.wait_until(lambda: all(path.exists() and text in path.read_text() for path in paths), limit=180)
