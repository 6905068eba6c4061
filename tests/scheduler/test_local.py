"""The embedded scheduler's interface: submissions, refusals, and the environment of jobs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import JobNotFound, SlurmUnavailable, SubmitRejected
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.runs.state import JobState
from dtslurm.scheduler.base import Scheduler
from dtslurm.scheduler.local import LocalScheduler, default_state_dir
from tests.scheduler.local_cluster import LocalCluster, submission
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    # What ends by itself never waits so long; on a busy machine, less would kill it before.
    with LocalCluster(tmp_path, kill_wait=30.0) as local_cluster:
        yield local_cluster


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_creating_a_local_scheduler_touches_no_files(tmp_path: Path) -> None:
    scheduler: Scheduler = LocalScheduler(tmp_path / "state")
    assert isinstance(scheduler, LocalScheduler)
    assert not (tmp_path / "state").exists()


def test_state_directory_follows_the_environment() -> None:
    assert default_state_dir({"DTSLURM_LOCAL_STATE": "/a"}) == Path("/a")
    assert default_state_dir({"XDG_STATE_HOME": "/x"}) == Path("/x/dtslurm/local")
    assert default_state_dir({}) == Path.home() / ".local/state/dtslurm/local"


def test_local_profile_describes_this_machine(tmp_path: Path) -> None:
    profile = LocalScheduler(tmp_path).profile(ClusterProfile(name="local", scheduler="local"))
    node = profile.node_type(None)
    assert profile.default_node_type == "this-machine"
    assert node is not None
    assert node.schedulable_cpus == len(os.sched_getaffinity(0))
    assert node.memory is not None
    assert node.memory.mib > 100
    assert profile.slurm.head_address == "127.0.0.1"
    assert profile.slurm.max_nodes == 64


def test_batch_environment_has_only_slurm_login_and_exported_variables(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "RANK", "MASTER_ADDR", "AWS_SECRET", "SLURM_PROCID", "LD_PRELOAD"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    monkeypatch.setenv("TMPDIR", "/tmp/x")
    monkeypatch.setenv("WANTED", "yes")
    status = cluster.run(
        "env; pwd",
        "--nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --gpus-per-node=a100:3 --mem=1G --time=10",
        "--export=NONE,WANTED,GIVEN=1",
    )
    assert (status.state, status.exit_code, status.signal, status.reason) == (JobState.COMPLETED, 0, None, "")
    result = variables(cluster.output("1"))
    assert not {name for name in result if result[name] == "leak"}
    start = int(result.pop("SLURM_JOB_START_TIME"))
    assert int(result.pop("SLURM_JOB_END_TIME")) == start + 600
    assert result["PATH"].startswith(str(cluster.folder / "state" / "bin"))
    assert result["PATH"].endswith(os.environ["PATH"])
    expected = {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "0,1,2",
        "GIVEN": "1",
        "HOME": os.environ["HOME"],
        "LC_TIME": "C.UTF-8",
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "3",
        "SLURM_GPUS_PER_NODE": "3",
        "SLURM_JOBID": "1",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURM_JOB_GPUS": "0,1,2",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "local[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_PARTITION": "local",
        "SLURM_MEM_PER_NODE": "1024",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "local[1-2]",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "0",
        "SLURM_SUBMIT_DIR": str(cluster.folder),
        "SLURM_SUBMIT_HOST": os.uname().nodename.split(".")[0],
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURMD_NODENAME": "local1",
        "TMPDIR": "/tmp/x",
        "WANTED": "yes",
    }
    assert {name: result.get(name) for name in expected} == expected
    assert "SLURM_RESTART_COUNT" not in result
    assert "SLURM_STEP_ID" not in result
    login = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "TMPDIR", "XDG_RUNTIME_DIR"}
    shell_own = {"PWD", "SHLVL", "_", "OLDPWD"}
    others = {
        name
        for name in result
        if not name.startswith(("SLURM_", "LC_")) and name not in login | shell_own | set(expected)
    }
    assert others == {"DTSLURM_LOCAL_STATE", "ENVIRONMENT", "HOSTNAME"}


def test_only_requested_resources_are_set_in_the_environment(cluster: LocalCluster) -> None:
    cluster.run("env", "-N3")
    result = variables(cluster.output("1"))
    unset = (
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_CPUS_PER_TASK",
        "SLURM_MEM_PER_NODE",
    )
    assert not set(unset) & set(result)
    assert "CUDA_VISIBLE_DEVICES" not in result
    assert result["SLURM_TASKS_PER_NODE"] == "1(x3)"


def test_login_shell_keeps_srun_first_on_path(cluster: LocalCluster) -> None:
    cluster.run(
        "command -v srun; echo ${BASH_ENV-unset}; srun -n1 bash -c 'command -v scontrol'",
        shebang="#!/bin/bash -l",
    )
    where = str(cluster.folder / "state" / "bin")
    words = cluster.output("1").split()
    assert words[0].startswith(where)
    assert words[1] == "unset"
    assert words[2].startswith(where)


def test_job_uses_its_input_output_and_error_files(cluster: LocalCluster) -> None:
    (cluster.folder / "in.txt").write_text("from a file\n")
    (cluster.folder / "sub").mkdir()
    (cluster.folder / "e.txt").write_text("before\n")
    cluster.run(
        "cat; echo oops >&2; pwd",
        f"-D sub -i {cluster.folder}/in.txt -e {cluster.folder}/e.txt",
        "-o o-%A-%a-%4j-%x-%N-%%.txt --open-mode=append",
    )
    assert (cluster.folder / "sub" / "o-1-4294967294-0001-job-local1-%.txt").read_text() == (
        f"from a file\n{cluster.folder}/sub\n"
    )
    assert (cluster.folder / "e.txt").read_text() == "before\noops\n"


def test_job_fails_when_its_output_cannot_be_written(cluster: LocalCluster) -> None:
    status = cluster.run("true", "-o /nonexistent/x.out")
    assert status.state is JobState.FAILED
    assert status.exit_code == 1
    assert "/nonexistent/x.out" in status.reason


def test_default_output_file_is_named_after_the_job(cluster: LocalCluster) -> None:
    script = "#!/bin/sh\necho hello\n"
    path = cluster.folder / "plain.sh"
    path.write_text(script)
    job = cluster.scheduler.submit(submission(script, cluster.folder), str(path))
    assert cluster.wait(job).name == "plain.sh"
    assert (cluster.folder / f"slurm-{job}.out").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("body", "state", "code", "signal"),
    [
        ("exit 0", JobState.COMPLETED, 0, None),
        ("exit 3", JobState.FAILED, 3, None),
        ("exit 137", JobState.FAILED, 137, None),
        ("kill -KILL $$", JobState.FAILED, 0, 9),
        ("kill -SEGV $$", JobState.FAILED, 0, 11),
    ],
)
def test_job_state_follows_the_exit_code(
    cluster: LocalCluster, body: str, state: JobState, code: int, signal: int | None
) -> None:
    status = cluster.run("ulimit -c 0\n" + body)
    assert (status.state, status.exit_code, status.signal) == (state, code, signal)
    assert status.terminal
    assert status.source == "local"
    assert status.end_time is not None
    assert status.start_time is not None
    assert status.end_time >= status.start_time


def test_job_with_a_missing_interpreter_fails(cluster: LocalCluster) -> None:
    status = cluster.run("true", shebang="#!/nonexistent/bash")
    assert (status.state, status.exit_code) == (JobState.FAILED, 2)
    assert "/nonexistent/bash: No such file or directory" in cluster.output("1")


def test_job_outlives_its_submitter_and_has_no_terminal(cluster: LocalCluster) -> None:
    script = cluster.folder / "s.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -o o.txt\nps -o tty= -p $$; ps -o sid= -p $$; sleep 0.5; echo done\n"
    )
    program = f"""
from pathlib import Path
from tests.scheduler.local_cluster import submission
from dtslurm.scheduler.local import LocalScheduler
script = Path({str(script)!r})
LocalScheduler(Path({str(cluster.folder / "state")!r}), kill_wait=1).submit(
    submission(script.read_text(), Path({str(cluster.folder)!r})), str(script))
"""
    # Nothing of the job may hold on to the submitter's pipes, or this would wait for its end.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert cluster.wait("1").ok
    terminal, session, last = (cluster.folder / "o.txt").read_text().split()
    assert (terminal, last) == ("?", "done")
    assert int(session) != os.getsid(0)


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("--mem=9000", "9000 MiB of memory are requested; this machine has 8000"),
        ("-N 65", "at most 64"),
        ("--bogus=1", "line 4: the embedded scheduler does not offer the option --bogus"),
        ("--begin=now+1hour", "--begin"),
        ("hello", "line 4: invalid directive in the batch script: hello"),
        ("--time=abc", "--time: 'abc' is not a time limit"),
        ("--array=3-1", "--array: '3-1' is not an array"),
        ("--signal=B:USR9@10", "--signal"),
        ("--dependency=afterok:99", "there is no job 99"),
        ("--kill-on-invalid-dep=maybe", "must be yes or no"),
        ("--dependency=bogus:1", "--dependency"),
        ("--gres=nvme:1", "no generic resource 'nvme'"),
        ("-N2 --gpus=3", "--gpus=3 cannot be divided"),
        ("--nodes", "--nodes needs a value"),
        ("--open-mode=x", "--open-mode"),
    ],
)
def test_submission_beyond_the_machine_or_with_unknown_options_is_refused(
    cluster: LocalCluster, directive: str, words: str
) -> None:
    with pytest.raises(SubmitRejected) as caught:
        cluster.submit("true", directive)
    assert words in "\n".join(caught.value.lines())
    problems = cluster.scheduler.validate(submission(cluster.text("true", directive), cluster.folder))
    assert words in "\n".join(problems)
    assert cluster.state.all_ids() == []


def test_all_problems_of_a_script_are_reported_together(cluster: LocalCluster) -> None:
    text = cluster.text("true", "--time=x --mem=y", "--array=z")
    assert len(cluster.scheduler.validate(submission(text, cluster.folder))) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("echo hi\n", "first line must start with #!"),
        ("#!/bin/bash\r\ntrue\r\n", "DOS line breaks"),
    ],
)
def test_text_that_is_not_a_batch_script_is_refused(cluster: LocalCluster, text: str, words: str) -> None:
    path = cluster.folder / "s"
    path.write_bytes(text.encode())
    with pytest.raises(SubmitRejected, match="refused") as caught:
        cluster.scheduler.submit(submission(text, cluster.folder), str(path))
    assert words in "\n".join(caught.value.lines())


def test_missing_gpus_are_emulated_with_a_notice(cluster: LocalCluster) -> None:
    sub = submission(cluster.text("true", "-N2 --gpus-per-node=8"), cluster.folder)
    assert cluster.scheduler.validate(sub) == []
    notices = cluster.scheduler.notices(sub)
    assert [line for line in notices if "no GPU: the 8 GPUs per node are emulated" in line]
    assert [line for line in notices if "2 nodes are emulated" in line]
    assert cluster.scheduler.notices(submission(cluster.text("true"), cluster.folder)) == []
    job = cluster.submit("echo cpu=$ACCELERATE_USE_CPU", "--gpus-per-node=8")
    assert cluster.wait(job).ok
    assert cluster.output(job) == "cpu=true\n"


@pytest.mark.parametrize(
    ("directive", "ranks"), [("-c 9", 1), ("--ntasks-per-node=9", 9), ("--ntasks-per-node=3 -c 3", 3)]
)
def test_job_may_request_more_cpus_than_the_machine_has(
    cluster: LocalCluster, directive: str, ranks: int
) -> None:
    text = cluster.text("true", directive)
    assert cluster.scheduler.validate(submission(text, cluster.folder)) == []
    assert cluster.scheduler.notices(submission(text, cluster.folder)) == [
        "9 CPUs per node are requested and this machine has 8: the ranks share them"
    ]
    job = cluster.submit(f"srun --ntasks={ranks} echo hello", directive)
    assert cluster.wait(job).ok
    assert cluster.output(job) == "hello\n" * ranks


def test_real_gpus_are_counted_and_allocated_to_a_single_job(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, gpus=["2", "3", "5"]) as cluster:
        sub = submission(cluster.text("true", "-N2 --gpus-per-node=2"), tmp_path)
        assert cluster.scheduler.validate(sub) == ["4 GPUs are requested (2 nodes x 2); this machine has 3"]
        body = "echo gpus=$CUDA_VISIBLE_DEVICES; until [ -e go ]; do sleep 0.02; done"
        first = cluster.submit(body, "--gres=gpu:2")
        second = cluster.submit(body, "--gpus-per-node=1")
        third = cluster.submit(body, "--gpus-per-node=1")
        other = cluster.submit("echo gpus=$CUDA_VISIBLE_DEVICES.; srun bash -c 'echo $CUDA_VISIBLE_DEVICES.'")
        cluster.saw(first, "gpus=2,3\n")
        cluster.saw(second, "gpus=5\n")
        assert cluster.status(third).reason == "Resources"
        (tmp_path / "go").touch()
        assert cluster.wait(third).ok
        assert cluster.wait(other).ok
        assert cluster.output(other) == "gpus=.\n.\n"


def test_state_files_are_private(cluster: LocalCluster) -> None:
    cluster.run("true")
    for path in [cluster.folder / "state", *(cluster.folder / "state").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_job_is_found_by_its_token(cluster: LocalCluster) -> None:
    first = cluster.submit("true", "--comment=mine", token="abc")
    array = cluster.submit("true", "--array=1-2", token="def")
    comment = cluster.status(first).comment
    assert comment.startswith("dtslurm:abc:")
    assert cluster.scheduler.find(comment) == first
    assert cluster.scheduler.find(cluster.status(f"{array}_1").comment) == array
    assert cluster.scheduler.find("dtslurm:abc") is None


def test_unknown_job_has_no_status_and_cannot_be_cancelled(cluster: LocalCluster) -> None:
    assert cluster.scheduler.query(["7", "7_1", "x"]) == {"7": [], "7_1": [], "x": []}
    with pytest.raises(JobNotFound, match="no job 7"):
        cluster.scheduler.cancel(["7"])


def test_unusable_state_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scheduler = LocalScheduler(tmp_path / "file" / "state")
    with pytest.raises(SlurmUnavailable) as caught:
        scheduler.query(["1"])
    assert "DTSLURM_LOCAL_STATE" in caught.value.hint
    script = tmp_path / "s"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(SlurmUnavailable):
        scheduler.submit(submission("#!/bin/sh\n", tmp_path), str(script))
    with pytest.raises(SubmitRejected, match="cannot read"):
        LocalScheduler(tmp_path / "s2").submit(submission("#!/bin/sh\n", tmp_path), str(tmp_path / "none"))


def test_concurrent_submissions_get_distinct_ids(cluster: LocalCluster) -> None:
    with ThreadPoolExecutor(20) as pool:
        jobs = list(pool.map(lambda number: cluster.submit(f"echo {number}", token=str(number)), range(20)))
    assert sorted(map(int, jobs)) == list(range(1, 21))
    for number, job in enumerate(jobs):
        assert cluster.wait(job).ok
        assert cluster.output(job) == f"{number}\n"


def test_job_submitted_by_a_job_outlives_its_submitter(cluster: LocalCluster) -> None:
    script = cluster.folder / "next.sh"
    script.write_text("#!/bin/bash\n#SBATCH -o next.txt\nuntil [ -e go ]; do sleep 0.02; done; echo done\n")
    program = cluster.folder / "chain.py"
    program.write_text(f"""
from pathlib import Path
from tests.scheduler.local_cluster import submission
from dtslurm.scheduler.local import LocalScheduler
script = Path({str(script)!r})
folder = Path({str(cluster.folder)!r})
print("next", LocalScheduler(kill_wait=1).submit(submission(script.read_text(), folder), str(script)))
""")
    root = Path(__file__).parents[2]
    job = cluster.submit(f"cd {root}; srun -n1 {sys.executable} -c 'exec(open(\"{program}\").read())'")
    assert cluster.wait(job).ok, cluster.output(job)
    assert cluster.output(job) == "next 2\n"
    assert cluster.status("2").state is JobState.RUNNING
    (cluster.folder / "go").touch()
    assert cluster.wait("2").ok
    assert (cluster.folder / "next.txt").read_text() == "done\n"


def test_job_of_another_host_has_an_unknown_state(cluster: LocalCluster) -> None:
    job = cluster.submit("until [ -e go ]; do sleep 0.02; done")
    cluster.wait(job, JobState.RUNNING)
    record = cluster.state.load(1)
    assert record is not None
    with cluster.state.locked():
        cluster.state.save({**record, "host": "elsewhere"})
    status = cluster.status(job)
    assert (status.state, status.terminal) == (JobState.UNKNOWN, False)
    assert "elsewhere" in status.reason
    with cluster.state.locked():
        cluster.state.save(record)
    (cluster.folder / "go").touch()
    assert cluster.wait(job).ok


def test_profile_retains_values_that_are_set(tmp_path: Path) -> None:
    profile = ClusterProfile(name="local", scheduler="local")
    given = replace(profile, slurm=replace(profile.slurm, head_address="host", max_nodes=3))
    made = LocalScheduler(tmp_path).profile(given)
    assert (made.slurm.head_address, made.slurm.max_nodes) == ("host", 3)


def test_script_with_non_utf8_bytes_runs_unchanged(cluster: LocalCluster) -> None:
    path = cluster.folder / "odd.sh"
    path.write_bytes(b"#!/bin/bash\n#SBATCH -o o.txt\nprintf '\xff\xc3\xa4'\n")
    job = cluster.scheduler.submit(submission("", cluster.folder), str(path))
    assert cluster.wait(job).ok
    assert (cluster.folder / "o.txt").read_bytes() == b"\xff\xc3\xa4"


def test_remaining_processes_are_killed_at_the_end_of_a_job(cluster: LocalCluster) -> None:
    # One in a session of its own, one orphaned, one without environment, one that ignores SIGTERM.
    job = cluster.submit("""
        setsid sleep 711.0 & (sleep 712.0 &) ; env -i sleep 713.0 & (trap '' TERM; sleep 714.0) & disown -a
        srun -n1 bash -c '(setsid sleep 715.0 &); (env -i setsid sleep 716.0 &)'
        echo started
    """)
    assert cluster.wait(job).ok
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listing.splitlines() if line.startswith("sleep 71")]


def test_remaining_steps_have_time_to_end_after_the_batch_script(cluster: LocalCluster) -> None:
    job = cluster.submit("""
        srun -n1 bash -c 'trap "echo saved; exit" TERM; echo ready; sleep 60 & wait' &
        until grep -q ready job-$SLURM_JOB_ID.out; do sleep 0.02; done
    """)
    assert cluster.wait(job).ok
    assert "saved" in cluster.output(job)
    wait_until(lambda: not cluster.state.keeper_alive(1))
