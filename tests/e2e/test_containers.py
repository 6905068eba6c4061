"""Ranks inside an image, with this machine's container runtime; without a runtime the tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import Cli
from tests.e2e.test_signals import send_early_signal

RUNTIMES = [name for name in ("apptainer", "singularity") if shutil.which(name)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNTIMES, reason="neither apptainer nor singularity is on PATH"),
]


@pytest.fixture
def boxed(cli: Cli) -> Cli:
    """A cluster whose profile names the runtime, and an image that borrows this machine's programs."""
    runtime = RUNTIMES[0]
    program = Path(str(shutil.which(runtime)))
    image = cli.folder / "image"
    for name in ("etc", "usr", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home"):
        (image / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf", "localtime"):
        (image / "etc" / name).touch()
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    (image / "etc" / "image").write_text("inside\n")
    probe = [str(program), "exec", "--bind=/usr", str(image), "cat", "/etc/image"]
    shown = subprocess.run(probe, capture_output=True, text=True, check=False)
    if shown.stdout != "inside\n":
        pytest.skip(f"{runtime} cannot start a container here: {shown.stderr.strip()[-300:]}")
    (cli.folder / "cluster_profiles").mkdir()
    text = f"extends: {cli.cluster}\ncontainer:\n  runtime: {runtime}\nenvironment:\n"
    text += f"  setup: ['export PATH=\"{program.parent}:$PATH\"']\n"
    (cli.folder / "cluster_profiles" / "boxed.yaml").write_text(text)
    return Cli("boxed", cli.folder, cli.env, cli.started)


def submit(boxed: Cli, *more: str) -> tuple[str, RunDir]:
    """Start four ranks in the image, by the Python that runs this test."""
    mounts = ["--container-mount", "/usr", "--container-mount", sys.base_prefix]
    python = ["--python", str(Path(sys.base_prefix, "bin", "python3"))]
    place = ["-N2", "--ntasks-per-node", "2", "-l", "srun", "--container", "./image"]
    job = boxed.submit(*place, *mounts, *python, *more)
    return job, boxed.run_dir(job)


def test_every_rank_runs_in_the_image(boxed: Cli) -> None:
    script = boxed.script(
        """
        import os
        inside = open("/etc/image").read().strip()
        folder = os.path.isdir(os.environ["DTSLURM_CHECKPOINT_DIR"])
        print(inside, os.environ["RANK"], os.environ["WORLD_SIZE"], bool(os.environ["MASTER_ADDR"]), folder)
        print(os.environ["GREETING"], os.getcwd())
        """
    )
    job, run = submit(boxed, "--env", "GREETING=good day", script)
    status = boxed.wait_for_end(job, limit=120)["statuses"][0]
    texts = [(run.logs(0) / f"rank-{rank}.log").read_text().splitlines() for rank in range(4)]
    assert texts == [[f"inside {rank} 4 True True", f"good day {boxed.folder}"] for rank in range(4)]
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0)


def test_early_signal_and_exit_codes_cross_the_container(boxed: Cli) -> None:
    script = boxed.script(
        """
        import os, signal, time
        leave = lambda number, frame: os._exit(9 if os.environ["RANK"] == "2" else 85)
        signal.signal(signal.SIGUSR2, leave)
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    job, run = submit(boxed, "--signal-before", "300", script)
    send_early_signal(boxed, job, run)
    status = boxed.wait_for_end(job, limit=120)["statuses"][0]
    assert run.first_failure(0) == (2, 9)
    assert (status["state"], status["exit_code"]) == ("FAILED", 9)
