"""Invalid input and faults with a cluster behind SSH: a clear error, no partial submission, no lost job."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context
from tests.disks import small_disk
from tests.e2e.conftest import Cli, far_profile
from tests.lab.cluster import SlurmLab
from tests.sshd.fixtures import Login

pytestmark = pytest.mark.slurm

SLURM = {"sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo", "srun", "sacctmgr"}


def nothing_is_left(far: Cli, tmp_path: Path, root: Path) -> None:
    assert [path for path in root.glob("*") if not path.name.startswith(".")] == []
    assert list((tmp_path / "state/dtslurm/remote/far").glob("*")) == []
    assert far.recorded_runs() == []


def submit(far: Cli, *words: str, code: int) -> str:
    done = far("submit", "--cluster", "far", "-t", "5", *words, "train.py", code=code)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture
def without_slurm(sshd_login: Login, tmp_path: Path) -> str:
    """A login node of the same machine on which no command of Slurm is found."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin"):
        for path in Path(folder).glob("*"):
            if path.name not in SLURM and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    home = sshd_login.lab.home("bare")
    (home / ".bash_profile").write_text(f"PATH={programs}\n")
    sshd_login.lab.server("bare", env={"HOME": str(home), "PATH": str(programs)})
    return "bare"


def test_submission_to_a_login_node_without_sbatch_is_refused(
    far: Cli, tmp_path: Path, without_slurm: str
) -> None:
    far_profile(tmp_path, without_slurm)
    assert "bare has no program scontrol" in submit(far, code=4)
    profile = tmp_path / "config/dtslurm/cluster_profiles/far.yaml"
    text = "slurm: {partitions: {main: {}}, partition: main}\nnode_types: {any: {cpus: 8}}\n"
    profile.write_text(profile.read_text() + text)  # nothing need be asked before sbatch is called
    assert "the cluster has no program sbatch; no job was queued" in submit(far, "--no-check", code=4)
    nothing_is_left(far, tmp_path, tmp_path / "runs")


def test_f16_submission_to_a_full_run_root_is_refused(far: Cli, tmp_path: Path, sshd_login: Login) -> None:
    with small_disk(tmp_path / "small", "size=64k,nr_inodes=200") as small:
        far_profile(tmp_path, sshd_login.host, root=small)
        assert f"the file system of {small}/" in submit(far, code=2)
        (far.folder / "data.bin").write_bytes(os.urandom(200_000))
        result = submit(far, "--no-check", code=5)
        assert "disk full" in result
        assert f"file system {small}: " in result
        nothing_is_left(far, tmp_path, small)


def test_f16_submission_to_a_run_root_without_inodes_is_refused(
    far: Cli, tmp_path: Path, sshd_login: Login
) -> None:
    with small_disk(tmp_path / "small", "size=20m,nr_inodes=6") as small:
        far_profile(tmp_path, sshd_login.host, root=small)
        assert "more files" in submit(far, code=2)
        assert "disk full" in submit(far, "--no-check", code=5)
        nothing_is_left(far, tmp_path, small)


def test_submission_to_a_read_only_remote_home_is_refused(
    far: Cli, tmp_path: Path, sshd_login: Login
) -> None:
    with small_disk(tmp_path / "home", "size=1m") as home:
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        far_profile(tmp_path, sshd_login.host, root=home / "runs")
        assert f"the run root is not writable: {home}" in submit(far, code=2)
        assert "read-only" in submit(far, "--no-check", code=5)
        nothing_is_left(far, tmp_path, home / "runs")


def test_submission_needs_a_writable_state_directory_but_no_writable_cache(far: Cli, tmp_path: Path) -> None:
    with small_disk(tmp_path / "here", "size=1m") as here:
        subprocess.run(["mount", "-o", "remount,ro", str(here)], check=True)
        far.env["XDG_STATE_HOME"] = str(here / "state")
        assert "ead-only" in submit(far, "--no-check", code=5)  # the intent comes before everything
        assert [path for path in (tmp_path / "runs").glob("*") if path.name[0] != "."] == []
        far.env["XDG_STATE_HOME"] = str(tmp_path / "state")
        far.env["XDG_CACHE_HOME"] = str(here / "cache")  # what is only remembered may be missing
        job = far.submit("train.py")
        assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"


def test_remote_home_with_spaces_and_unicode_works(
    far: Cli, tmp_path: Path, sshd_login: Login, slurm_lab: SlurmLab
) -> None:
    home = sshd_login.lab.home("hömé of ☃ x")
    sshd_login.lab.server("odd", env={**slurm_lab.env, "HOME": str(home)})
    far_profile(tmp_path, "odd", root=Path("~/my runs"))
    job = far.submit("train.py")
    assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert far.status(job)["record"]["run_dir"].startswith(f"{home}/my runs/")
    assert "hello" in far("logs", job).stdout


def test_link_cycles_sockets_and_devices_in_the_project_are_skipped(far: Cli, tmp_path: Path) -> None:
    (far.folder / "circle").symlink_to("circle")
    (far.folder / "above").symlink_to("..")
    os.mkfifo(far.folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(far.folder)  # a socket's path is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(Path(__file__).parents[2])
        if os.geteuid() == 0:
            os.mknod(far.folder / "device", 0o600 | 0o020000, os.makedev(1, 3))
        done = far("submit", "--cluster", "far", "-t", "5", "--parsable", "train.py")
    job = done.stdout.strip()
    far.started.append(job)
    assert "skipped, because they are neither files nor links: " in done.stderr
    assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    code = Path(far.status(job)["record"]["run_dir"]) / "code"
    assert {path.name for path in code.iterdir()} == {"train.py", "circle", "above"}


def test_f66_clock_difference_to_the_login_node_is_reported(far: Cli) -> None:
    env = {**os.environ, **far.env}
    context = Context(cwd=far.folder, env=env, clock=lambda: time.time() - 300)
    request = JobRequest(script="train.py", cluster="far", time="5")
    notices = prepare(context, request, standalone=False).submission.notices
    assert any(re.search(r"clock is (29\d|30\d) s ahead of", line) for line in notices)


def test_f57_following_continues_after_a_restart_of_the_login_node(
    tmp_path: Path, sshd_login: Login, slurm_lab: SlurmLab
) -> None:
    lab = sshd_login.lab
    alias = f"s{secrets.token_hex(2)}"  # it may be tried twice
    server = lab.server(alias, env={**slurm_lab.env, "HOME": str(lab.home(alias))})
    far_profile(tmp_path, alias)
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("far", folder, dict(lab.env))
    go = folder / "go"
    script = cli.script(
        """
        import pathlib, sys, time
        step = 0
        while not pathlib.Path(sys.argv[1]).exists():
            step += 1
            print("step", step, flush=True)
            time.sleep(0.1)
        """
    )
    job = cli.submit("-l", "srun", script, str(go))
    out, result, environment = tmp_path / "followed", tmp_path / "told", {**os.environ, **cli.env}
    words = [sys.executable, "-m", "dtslurm", "logs", "-f", job]
    with (
        out.open("w") as lines,
        result.open("w") as notices,
        subprocess.Popen(words, cwd=folder, env=environment, stdout=lines, stderr=notices) as follower,
    ):
        try:
            cli.wait_until(lambda: "step 5\n" in out.read_text())
            server.down()
            cli.wait_until(lambda: result.read_text().count("connection lost") > 1)
            lab.up(server)
            size = out.stat().st_size
            cli.wait_until(lambda: out.stat().st_size > size + 200)
        finally:
            go.touch()
        try:
            cli.wait_until(lambda: follower.poll() is not None, 180)  # it may ask again only after a minute
        except AssertionError as error:
            raise AssertionError(f"{error}: {result.read_text()[-3000:]} {out.read_text()[-300:]}") from None
        assert follower.returncode == 0, result.read_text()
    steps = [int(line.split()[-1]) for line in out.read_text().splitlines() if " step " in line]
    assert steps == list(range(1, len(steps) + 1))
