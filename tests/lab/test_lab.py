from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import conf, keeper
from tests.lab.cluster import FailedCommand, LabError, SlurmLab
from tests.lab.software import Software
from tests.processes import is_alive
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534

# What a job may leave behind: a process of another session, with nothing of the cluster in its environment.
ORPHAN = """#!/bin/bash
for i in 1 2; do env -i setsid sleep 1000 </dev/null >/dev/null 2>&1 & done
jobs -p > pids.tmp; echo $$ >> pids.tmp; mv pids.tmp pids
wait
"""

OWNER = """
import pathlib, sys, time
from tests.lab.cluster import SlurmLab
root = pathlib.Path(sys.argv[1])
lab = SlurmLab(root).up()
(root / "job.sh").write_text(sys.argv[2])
lab.run(["sbatch", "-o", "/dev/null", "job.sh"])
while not (root / "pids").exists():
    time.sleep(0.05)
print(lab.token, lab._keeper.pid, flush=True)
time.sleep(1000)
"""

ORDINARY_USER = """
import pathlib, sys
from tests.lab.cluster import SlurmLab
with SlurmLab(pathlib.Path(sys.argv[1])) as lab:
    command = "echo $(id -u) $CUDA_VISIBLE_DEVICES"
    print(lab.run(["srun", "-N4", "--gpus-per-node=2", "sh", "-c", command]).stdout)
"""


def orphan_pids(lab_root: Path) -> list[int]:
    wait_until((lab_root / "pids").exists)
    pids = [int(word) for word in (lab_root / "pids").read_text(encoding="utf-8").split()]
    assert all(map(is_alive, pids))
    return pids


@pytest.fixture
def own_lab(slurm_software: Software, lab_root: Path) -> Iterator[SlurmLab]:
    with SlurmLab(lab_root, software=slurm_software) as lab:
        yield lab


def test_lab_has_the_expected_nodes_and_partitions(slurm_lab: SlurmLab) -> None:
    slurm_lab.wait_idle()
    out = slurm_lab.run(["sinfo", "-h", "-o", "%P|%D|%l|%s|%c|%G"]).stdout.split()
    assert out == [
        "main*|4|1-00:00:00|1-infinite|8|gpu:a100:8",
        "short|2|10:00|1-2|8|gpu:a100:8",
    ]
    assert slurm_lab.version in slurm_lab.run(["sinfo", "-V"]).stdout


def test_srun_reaches_every_node(slurm_lab: SlurmLab) -> None:
    out = slurm_lab.run(["srun", "-N4", "sh", "-c", "echo $SLURMD_NODENAME"]).stdout
    assert sorted(out.split()) == ["n1", "n2", "n3", "n4"]
    if slurm_lab.names_resolve:
        assert "127.0.0.1" in slurm_lab.run(["srun", "getent", "hosts", "n3"]).stdout


def test_batch_job_sees_its_gpus(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    wrap = "--wrap=srun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    slurm_lab.run(["sbatch", "--wait", "-N2", "--gpus-per-node=2", "-o", "out", wrap], cwd=tmp_path)
    lines = sorted((tmp_path / "out").read_text(encoding="utf-8").splitlines())
    assert [line.split()[1] for line in lines] == ["0,1", "0,1"]
    assert len({line.split()[0] for line in lines}) == 2


def test_sacct_reports_the_end_of_a_job(slurm_lab: SlurmLab) -> None:
    done = slurm_lab.run(["sbatch", "--parsable", "--wait", "-o", "/dev/null", "--wrap=exit 3"], check=False)
    assert done.returncode == 3
    query = ["sacct", "-j", done.stdout.strip(), "-X", "-n", "-P", "-o", "State,ExitCode"]
    wait_until(lambda: slurm_lab.run(query).stdout.strip() == "FAILED|3:0")


def test_failed_command_error_contains_its_output(slurm_lab: SlurmLab) -> None:
    with pytest.raises(FailedCommand, match="invalid partition"):
        slurm_lab.run(["sbatch", "-p", "nowhere", "--wrap=true"])


def test_test_environment_is_separate_from_the_environment_of_the_user(
    slurm_env: SlurmLab, tmp_path: Path
) -> None:
    assert os.environ["SLURM_CONF"] == str(slurm_env.layout.slurm_conf)
    assert Path(os.environ["DTSLURM_RUN_ROOT"]).parent == tmp_path
    assert subprocess.run(["squeue", "-h"], check=True, capture_output=True).stderr == b""


@pytest.mark.slow
def test_requeued_job_starts_again_within_40_s(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    wrap = "--wrap=echo started >> starts; sleep 100"
    job = slurm_lab.run(["sbatch", "--parsable", "-o", "/dev/null", wrap], cwd=tmp_path).stdout.strip()
    starts = tmp_path / "starts"
    wait_until(starts.exists)
    slurm_lab.run(["scontrol", "requeue", job])
    wait_until(lambda: starts.read_text(encoding="utf-8").count("started") == 2, limit=40)
    slurm_lab.run(["scancel", job])


def test_lab_pauses_kills_and_restarts_the_controller(own_lab: SlurmLab) -> None:
    job = own_lab.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap=sleep 100"]).stdout.strip()
    own_lab.pause_controller()
    with pytest.raises(subprocess.TimeoutExpired):
        own_lab.run(["squeue"], timeout=1)
    own_lab.resume_controller()
    own_lab.run(["squeue"])
    own_lab.kill_controller()
    with pytest.raises(LabError, match="not running"):
        own_lab.pause_controller()
    own_lab.start_controller()
    assert job in own_lab.run(["squeue", "-h", "-o", "%i"]).stdout.split()


def test_lab_kills_and_restarts_a_node(own_lab: SlurmLab) -> None:
    (own_lab.root / "job.sh").write_text(ORPHAN, encoding="utf-8")
    job = own_lab.run(["sbatch", "--parsable", "-w", "n2", "-o", "/dev/null", "job.sh"]).stdout.strip()
    pids = orphan_pids(own_lab.root)
    own_lab.kill_node("n2")
    assert not any(map(is_alive, pids))
    own_lab.start_node("n2")
    own_lab.run(["scancel", job])  # Slurm itself misses the job only after SlurmdTimeout
    own_lab.wait_idle()
    with pytest.raises(ValueError, match="no node n9"):
        own_lab.kill_node("n9")


def test_extra_configuration_lines_replace_defaults(slurm_software: Software, lab_root: Path) -> None:
    extra = ["KillWait=7", "PartitionName=main Nodes=n1 Default=YES MaxTime=5 State=UP"]
    with SlurmLab(lab_root, software=slurm_software, nodes=2, gpus=0, extra_conf=extra) as lab:
        settings = lab.run(["scontrol", "show", "config"]).stdout
        limits = lab.run(["sinfo", "-h", "-o", "%P %l"]).stdout.splitlines()
    assert "KillWait                = 7 sec" in settings
    assert sorted(limits) == ["main* 5:00", "short 10:00"]


def test_invalid_configuration_is_reported_and_leaves_no_process(
    slurm_software: Software, lab_root: Path
) -> None:
    lab = SlurmLab(lab_root, software=slurm_software, extra_conf=["SelectType=select/nonsense"])
    with pytest.raises(LabError, match="nonsense"):
        lab.up()
    assert keeper.marked(lab.token) == []


def test_down_ends_all_processes_of_the_lab(own_lab: SlurmLab) -> None:
    (own_lab.root / "job.sh").write_text(ORPHAN, encoding="utf-8")
    own_lab.run(["sbatch", "-o", "/dev/null", "--export=NONE", "job.sh"])
    client = subprocess.Popen(["srun", "sleep", "1000"], env=own_lab.environ(), cwd=own_lab.root)
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        pids = orphan_pids(own_lab.root)
        own_lab.down()
        own_lab.down()
        assert client.wait(10) != 0
        assert not any(map(is_alive, pids))
        assert keeper.marked(own_lab.token) == []
        assert bystander.poll() is None
    finally:
        for process in (client, bystander):
            process.kill()
            process.wait()
    with pytest.raises(LabError, match="down"):
        own_lab.kill_node("n1")


@pytest.mark.slurm
@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_lab_ends_when_its_owner_or_keeper_is_killed(victim: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OWNER, str(tmp_path), ORPHAN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        try:
            assert owner.stdout is not None
            token, keeper_pid = owner.stdout.readline().split()
            pids = orphan_pids(tmp_path)
            os.kill(owner.pid if victim == "owner" else int(keeper_pid), signal.SIGKILL)
            wait_until(lambda: not keeper.marked(token) and not any(map(is_alive, pids)))
        finally:
            owner.kill()


def python_for(user: int) -> str:
    """A Python that this user can start (one in somebody's home he cannot)."""
    for python in (sys.executable, "/usr/bin/python3"):
        argv = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        try:
            if subprocess.run(argv, user=user, cwd="/", check=False, capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip(f"user {user} can start no Python >= 3.10")


@pytest.mark.slurm
def test_ordinary_user_can_run_a_lab(slurm_software: Software) -> None:
    """Root runs the lab as nobody; any other user is already an ordinary user."""
    user = os.geteuid() or NOBODY
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))  # pytest's own is closed to others
    try:
        shutil.copytree(REPOSITORY / "tests/lab", folder / "tests/lab")
        if root:
            os.chown(folder, user, user)
        done = subprocess.run(
            [python_for(user) if root else sys.executable, "-c", ORDINARY_USER, str(folder / "lab")],
            cwd=folder,
            env={**os.environ, "DTSLURM_SLURM_PREFIX": str(slurm_software.prefix or "")},
            capture_output=True,
            text=True,
            check=False,
            user=user if root else None,
            group=user if root else None,
            extra_groups=[] if root else None,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:4] == [f"{user} 0,1"] * 4
    finally:
        shutil.rmtree(folder)


def test_jobs_of_different_clusters_have_different_ids_and_those_of_different_processes_other_ports() -> None:
    clusters = conf.PORTS[:: conf.BLOCK]
    firsts = {conf.first_job_id(port, f"gw{process}"): process for port in clusters for process in range(6)}
    assert len(firsts) == len(clusters) * 6
    assert max(firsts) + 10 * conf.JOB_PORTS < 0x03FFFFFF  # the highest id that Slurm accepts
    lowest = [min(first % conf.JOB_PORTS for first in firsts if firsts[first] == one) for one in range(6)]
    highest = [max(first % conf.JOB_PORTS for first in firsts if firsts[first] == one) for one in range(6)]
    room = 200  # jobs that one cluster runs at most
    assert all(highest[one] + room < lowest[one + 1] for one in range(5))
    assert highest[5] + room < conf.JOB_PORTS
