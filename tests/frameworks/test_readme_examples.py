"""The README examples of other tools in docs/migrate.md: both columns run, and do the same.

simple_slurm, TorchX and NeMo Run are installed and run, on the suite's Slurm or on this machine, with the
changes that are listed here: job ids, partitions and sizes that the test Slurm does not have. Not run are
``sky launch``, which needs a cloud, and NeMo's recipes, which need GPUs. Lightning's example is taken from
the README that its package carries.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import Activated
from tests.frameworks.envs import environment
from tests.frameworks.test_torch_family import torch_python  # noqa: F401 - a fixture
from tests.lab.cluster import SlurmLab
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.sampled(3, "peers"),
]
ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
SAME = ("JobName", "TimeLimit", "CPUs/Task", "Dependency", "ArrayTaskId", "Partition")
DIST_APP = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), flush=True)
dist.destroy_process_group()
"""
RANKS = sorted(f"rank {rank} of 4 sum 6" for rank in range(4))
# In place of torchvision: the package index has it for one build of torch only, and the data are a download.
MNIST = """\
import torch


class datasets:
    class MNIST(torch.utils.data.Dataset):
        def __init__(self, root, download, transform):
            pass

        def __len__(self):
            return 60000

        def __getitem__(self, index):
            return torch.full((1, 28, 28), index / 60000), index % 10


class transforms:
    class ToTensor:
        pass
"""


def examples(project: str) -> list[tuple[str, str]]:
    """Return a project's examples and dtslurm's commands for them; lines of code are joined by newlines."""
    text = (ROOT / "docs" / "migrate.md").read_text().partition("## README examples of other tools\n")[2]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    [start] = [number for number, cells in enumerate(rows) if cells[0].startswith(f"| [{project}](")]
    result: list[tuple[str, str]] = []
    for cells in rows[start:]:
        if result and cells[0] != "|":
            break
        theirs, ours = ("\n".join(re.findall(r"`([^`]+)`", cell)) for cell in cells[-2:])
        result.append((theirs, ours))
    return result


def peer(name: str) -> Path:
    """Return the Python of a peer's environment, with the versions that the benchmarks pin."""
    lines = (PEERS / f"{name}.txt").read_text().splitlines()
    return environment(name, [line for line in lines if line and not line.startswith("#")])


def change(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, text
        text = text.replace(old, new)
    return text


def run(tool: Cli, python: Path, argv: list[str], **env: str) -> str:
    """Run a peer's program in the project; return what it prints."""
    path = f"{python.parent}{os.pathsep}{tool.env.get('PATH', os.environ['PATH'])}"
    done = subprocess.run(
        argv,
        env={**os.environ, **tool.env, "PATH": path, "HOME": str(tool.folder), **env},
        cwd=tool.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def shown(lab: SlurmLab, job: str) -> dict[str, str]:
    """Return what Slurm was asked for a job."""
    text = lab.run(["scontrol", "show", "job", job]).stdout.partition("\n\n")[0]
    return {name: found[1] for name in SAME if (found := re.search(rf"\b{name}=(\S+)", text))}


def dtslurm(tool: Cli, line: str, *more: str) -> str:
    """Run dtslurm's command; return the id of its job."""
    program, *words = shlex.split(line)
    assert program == "dtslurm"
    at = words.index("submit") + 1
    done = tool(*words[:at], "--parsable", *more, *words[at:])
    job = done.stdout.strip().splitlines()[0]
    tool.started.append(job)
    return job


@pytest.fixture
def tool(activated: Activated) -> Cli:
    return activated(Path(sys.executable))


def test_simple_slurm_example_and_dtslurm_submit_the_same_job(tool: Cli, slurm_lab: SlurmLab) -> None:
    python = peer("simple-slurm")
    (theirs, ours), *_ = examples("simple_slurm")
    tool.script("import sys\nprint('demo', sys.argv[1])", "demo.py")
    held = [slurm_lab.run(["sbatch", "--parsable", "--hold", "--wrap=true"]).stdout.strip() for _ in range(2)]
    both = {"65541": held[0], "34987": held[1], "module load python": "true"}
    code = change(theirs, {**both, "cpus_per_task=15": "cpus_per_task=2", "days=1": "days=0"})
    code = f"import datetime\nfrom simple_slurm import Slurm\n{code}"
    jobs = [re.findall(r"Submitted batch job (\d+)", run(tool, python, [str(python), "-c", code]))[0]]
    jobs.append(dtslurm(tool, change(ours, {**both, "-c 15": "-c 2", "1-02": "0-02"})))
    asked = [shown(slurm_lab, job) for job in jobs]
    assert asked[0] == asked[1]
    assert set(asked[0]) == set(SAME)
    slurm_lab.run(["scontrol", "release", *held])
    tool.wait_for_end(jobs[1], limit=240)
    slurm_lab.wait_for("the end of the other", lambda: jobs[0] not in slurm_lab.run(["squeue", "-h"]).stdout)
    for task in range(3, 12):
        assert (tool.folder / f"{jobs[0]}_{task}.out").read_text() == f"demo {task}\n"
        assert (tool.folder / f"{jobs[1]}_{task}.out").exists()
        assert f"demo {task}\n" in tool("logs", f"{jobs[1]}_{task}").stdout


def test_simple_slurm_command_and_cancel_examples_match_dtslurm(tool: Cli, slurm_lab: SlurmLab) -> None:
    python = peer("simple-slurm")
    _, (theirs, ours), (cancel_theirs, cancel_ours) = examples("simple_slurm")
    (tool.folder / "hostname.sh").write_text("#!/bin/sh\necho $HOSTNAME\n")
    (tool.folder / "hostname.sh").chmod(0o755)
    partition = {"compute.p": "main"}
    tool.env["HOSTNAME"] = "login1"  # a variable of login shells, which Slurm takes along
    run(tool, python, shlex.split(change(theirs, partition)))
    log = tool.folder / "slurm.log"
    slurm_lab.wait_for("its output", lambda: log.exists() and log.read_text() != "")
    assert log.read_text() == "login1\n"
    log.unlink()
    job = dtslurm(tool, change(ours, partition), "-t", "5")
    tool.wait_for_end(job)
    assert re.search(r"\bn\d$", tool("logs", job).stdout, re.MULTILINE)  # srun sets it on each node
    assert log.exists()
    waiting = [
        slurm_lab.run(["sbatch", "--parsable", "--hold", "--wrap=true"]).stdout.strip(),
        tool.submit("--sbatch=--hold", "-l", "single", tool.script("print()")),
    ]
    code = f"from simple_slurm import Slurm\nslurm = Slurm()\n{change(cancel_theirs, {'34987': waiting[0]})}"
    run(tool, python, [str(python), "-c", code])
    tool(*shlex.split(change(cancel_ours, {"34987": waiting[1]}))[1:])
    slurm_lab.wait_for("an empty queue", lambda: not slurm_lab.run(["squeue", "-h"]).stdout.strip())


def test_torchx_local_example_and_dtslurm_run_the_same_program(tool: Cli, tmp_path: Path) -> None:
    python = peer("torchx")
    (theirs, ours), _ = examples("TorchX")
    tool.script("import sys\nprint(f'Hello, {sys.argv[1]}!')", "my_app.py")
    # What it prints of the program's output may end early: it does not wait for the end of the log.
    logs = tmp_path / "logs"
    run(tool, python, shlex.split(change(theirs, {"local_cwd": f"local_cwd -cfg log_dir={logs}"})))
    assert "Hello, your name!\n" in {log.read_text() for log in logs.rglob("stdout.log")}
    tool.env["DTSLURM_LOCAL_STATE"] = str(tmp_path / "local")
    done = tool(*shlex.split(ours)[1:])
    assert "Hello, your name!" in done.stdout


def test_torchx_slurm_example_and_dtslurm_start_the_same_ranks(tool: Cli, slurm_lab: SlurmLab) -> None:
    python = peer("torchx")
    _, (theirs, ours) = examples("TorchX")
    tool.script(DIST_APP, "dist_app.py")
    argv = shlex.split(change(theirs, {"slurm dist": "slurm -cfg partition=main,time=5 dist"}))
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), tool.env["PATH"]])
    run(tool, python, argv, PATH=path)  # torchrun is of the environment that is active
    slurm_lab.wait_for("its end", lambda: not slurm_lab.run(["squeue", "-h"]).stdout.strip())

    def read_output() -> str:
        return "".join(file.read_text() for file in tool.folder.glob("slurm-*-dist_app-*.out"))

    with contextlib.suppress(AssertionError):  # the last output may be written after the end
        wait_until(lambda: read_output().count(" sum ") >= len(RANKS), limit=30)
    assert sorted(re.findall(r"rank \d of \d sum \d", read_output())) == RANKS, read_output()
    job = dtslurm(tool, ours, "-t", "5")
    tool.wait_for_end(job)
    assert sorted(re.findall(r"rank \d of \d sum \d", tool("logs", job).stdout)) == RANKS


@pytest.mark.timeout(1500)
def test_nemo_run_example_and_dtslurm_call_the_same_function(tool: Cli, tmp_path: Path) -> None:
    python = peer("nemo-run")
    [(theirs, ours)] = examples("NeMo Run")
    tool.script("def pretrain(steps: int):\n    print('pretrained', steps, 'steps')", "recipe.py")
    head = "from recipe import pretrain\nimport nemo_run as run\n"
    lines = "\n".join(f"    {line}" for line in theirs.splitlines())
    script = tool.script(f"{head}if __name__ == '__main__':\n{lines}\n", "theirs.py")
    home = {"NEMORUN_HOME": str(tmp_path / "nemo"), "PYTHONPATH": str(tool.folder)}
    assert "pretrained 3 steps" in run(tool, python, [str(python), script], **home)
    tool.env["DTSLURM_LOCAL_STATE"] = str(tmp_path / "local")
    tool.script(f"from recipe import pretrain\nimport dtslurm\n{ours}\n", "ours.py")
    run(tool, Path(sys.executable), [sys.executable, "ours.py"], PYTHONPATH=str(tool.folder))
    [log] = (tmp_path / "runs").glob("llama3_8b_pretraining-*/logs/0/rank-0.log")
    assert "pretrained 3 steps" in log.read_text()


def test_skypilot_task_runs_as_a_job_file(tool: Cli) -> None:
    [(_, ours)] = examples("SkyPilot")
    text = (ROOT / "docs" / "migrate.md").read_text().partition("### SkyPilot's task")[2]
    (tool.folder / "my_task.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    (tool.folder / "my_task.yaml").chmod(0o644)
    (tool.folder / "mnist").mkdir()
    tool.script("import os, sys\nprint(*sys.argv[1:], os.environ['SLURM_GPUS_ON_NODE'])", "mnist/main.py")
    job = dtslurm(tool, ours, "--ntasks-per-node", "1")
    tool.wait_for_end(job)
    assert "--epochs 1 8\n" in tool("logs", job).stdout


def test_lightning_example_trains(activated: Activated, torch_python: Path) -> None:  # noqa: F811
    tool = activated(torch_python)
    [metadata] = (torch_python.parents[1] / "lib").glob(
        "python*/site-packages/lightning-*.dist-info/METADATA"
    )
    code = metadata.read_text().partition("# main.py\n")[2].partition("```")[0]
    end = {
        "torchvision as tv": "mnist as tv",
        "L.Trainer()": "L.Trainer(max_steps=4, limit_val_batches=2, enable_checkpointing=False)",
    }
    tool.script(MNIST, "mnist.py")
    tool.script(
        change(code, end) + 'print("ranks", trainer.world_size, "steps", trainer.global_step)', "main.py"
    )
    (_, one), (_, many) = examples("Lightning")
    jobs = [dtslurm(tool, one, "-t", "10", "--snapshot")]
    spread = {"L.Trainer(": 'L.Trainer(accelerator="cpu", devices=2, num_nodes=2, '}
    (tool.folder / "main.py").write_text(change((tool.folder / "main.py").read_text(), spread))
    two = change(many, {"-N32": "-N2", "--gpus-per-node 8": "--ntasks-per-node 2"})
    jobs.append(dtslurm(tool, two, "-t", "10", "--snapshot"))
    for job, ranks in zip(jobs, (1, 4), strict=True):
        ended = tool.wait_for_end(job, limit=240)
        assert {status["state"] for status in ended["statuses"]} == {"COMPLETED"}
        assert tool("logs", job).stdout.count(f"ranks {ranks} steps 4\n") == ranks
