"""How long the shells around the ranks take until training starts, for small and very large jobs.

``python -m benchmarks.scale.wrapper`` renders jobs of 8 ranks on each of 8 to 12,500 nodes. It then runs, on
this machine, what one node runs at the start of an attempt, and what the first node runs before srun:

- the eight ``task.sh`` of a node, with the node's real agent and sampler, until the eight training scripts
  start, and the same scripts without them;
- ``step.sh`` until it executes srun, which is replaced by a program that notes the time; scontrol is real.

What all nodes do to the shared file system at the same time is not simulated: see ``attempt``.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dtslurm import assets
from dtslurm.config import profiles
from dtslurm.launch import registry
from dtslurm.launch.layout import resolve
from dtslurm.model.jobs.job import JobSpec, Resources
from dtslurm.model.units import Walltime
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace, Site, render
from dtslurm.services.submit import supervision
from dtslurm.services.wiring.context import Context
from tests.lab.software import find_or_unpack

RANKS_PER_NODE = 8
NODES = (8, 128, 1_250, 12_500)
ROUNDS = 7
LONGEST_S = 60.0
_TRAINING = '#!/bin/sh\ndate +%s.%N >"$STARTED-$RANK"\nexec sleep 600\n'
_SRUN = '#!/bin/sh\ndate +%s.%N >"$STARTED"\n'


def prepare_run(folder: Path, nodes: int) -> dict[str, str]:
    """Write the run directory of a job, with its shells and agent; return the environment of its tasks."""
    run_dir = folder / "run"
    for name in ("logs/0", "ranks/0", "metrics/0", "bin"):
        (run_dir / name).mkdir(parents=True)
    training = folder / "train"
    training.write_text(_TRAINING)
    training.chmod(0o700)
    (run_dir / "bin/srun").write_text(_SRUN)
    (run_dir / "bin/srun").chmod(0o700)
    script = render_job(str(training), str(run_dir), nodes)
    for name in ("task.sh", "step.sh"):
        (run_dir / name).write_text(
            script.partition(f"{name}\" <<'END' || exit\n")[2].partition("\nEND\n")[0]
        )
    for path, content in supervision.files(Context()).items():
        (run_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / path).write_bytes(content)
    for program in assets.worker("sampler").parent.glob("sampler*.py"):
        shutil.copy(program, run_dir)
    shutil.copy(assets.worker("supervisor").parent / "lib/json_records.py", run_dir)
    software = find_or_unpack()
    (folder / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\n"
        + (f"PluginDir={software.plugin_dir()}\n" if software.plugin_dir() else "")
    )
    variables = software.env()
    return {
        **os.environ,
        **variables,
        "PATH": f"{run_dir}/bin:{variables['PATH']}",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "TMPDIR": str(folder),
        "DTSLURM_RUN_DIR": str(run_dir), "DTSLURM_ATTEMPT": "0", "STARTED": str(folder / "started"),
        "SLURM_JOB_ID": "17", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n00001", "SLURM_NNODES": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": f"n[00001-{nodes:05}]",
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip


def render_job(training: str, run_dir: str, nodes: int) -> str:
    """Return the script of a supervised job with an early signal, one rank for each GPU."""
    cluster = profiles.load("a100x8-ib", cwd=Path("/"), env={"HOME": "/"}).profile
    resources = Resources(nodes=nodes, time=Walltime(3600))
    resolution = resolve(resources, cluster, one_process=False)
    if resolution.layout is None:
        raise ValueError("; ".join(resolution.problems))
    spec = JobSpec(
        name="train", script=training, args=(), work_dir=run_dir, python=shutil.which("python3") or "python3",
        resources=resources, launcher="srun", max_restarts=3, signal_before=120,
    )  # fmt: skip
    place = RunPlace(run_dir, f"{run_dir}/logs/batch.log", "0123456789ab")
    site = Site(cluster, Templates(folders=(assets.templates(),)))
    return render(spec, site, resolution.layout, registry.load("srun"), place).script


def start_ranks(folder: Path, environment: dict[str, str], command: list[str]) -> float:
    """Run a command for each rank of a node; return the seconds until the last training script started."""
    for path in folder.glob("started-*"):
        path.unlink()
    began = time.time()
    ranks = [
        subprocess.Popen(
            command,
            env={
                **environment, "RANK": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)
            },
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(RANKS_PER_NODE)
    ]  # fmt: skip
    try:
        while len(times := read_times(folder)) < RANKS_PER_NODE:
            if time.time() > began + LONGEST_S:
                raise TimeoutError("the training scripts did not start")
            time.sleep(0.01)
        return max(times) - began
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_times(folder: Path) -> list[float]:
    """Return the times that the training scripts have written completely."""
    texts = [path.read_text() for path in folder.glob("started-*")]
    return [float(text) for text in texts if text.endswith("\n")]


def start_step(folder: Path, environment: dict[str, str]) -> float:
    """Return the seconds from the start of ``step.sh`` until it executes srun."""
    began = time.time()
    command = ["bash", str(folder / "run/step.sh"), "0", environment["SLURM_JOB_NODELIST"]]
    # It then waits for records of the ranks, which do not exist.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        started = Path(environment["STARTED"])
        while not (started.exists() and started.read_text().endswith("\n")):
            if time.time() > began + LONGEST_S:
                raise TimeoutError("step.sh did not execute srun")
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    seconds = float(started.read_text()) - began
    started.unlink()
    return seconds


def main() -> None:
    """Measure in turns, so that a busy moment concerns all sizes, and print the medians."""
    folders = {nodes: Path(tempfile.mkdtemp(prefix="dtslurm-wrapper-")) for nodes in NODES}
    environments = {nodes: prepare_run(folder, nodes) for nodes, folder in folders.items()}
    seconds: dict[tuple[str, int], list[float]] = {}
    try:
        for _ in range(ROUNDS):
            for nodes, folder in folders.items():
                environment = environments[nodes]
                task = ["bash", str(folder / "run/task.sh")]
                bare = start_ranks(folder, environment, [str(folder / "train")])
                wrapped = start_ranks(folder, environment, task)
                for name, value in (
                    ("bare", bare), ("wrapped", wrapped), ("step.sh", start_step(folder, environment))
                ):  # fmt: skip
                    seconds.setdefault((name, nodes), []).append(value)
    finally:
        for folder in folders.values():
            subprocess.run(["pkill", "-f", str(folder)], check=False)  # agents and samplers
            shutil.rmtree(folder, ignore_errors=True)
    print("| | " + " | ".join(f"{nodes:,} nodes" for nodes in NODES) + " |")
    print("|---" * (len(NODES) + 1) + "|")
    for name, label in (
        ("bare", "eight training scripts alone"),
        ("wrapped", "the same in their shells, with agent and sampler"),
        ("step.sh", "step.sh until srun"),
    ):
        cells = [f"{statistics.median(seconds[name, nodes]):.2f} s" for nodes in NODES]
        print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
