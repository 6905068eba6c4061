"""srun and scontrol of the embedded scheduler, with real jobs and real processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.model.runs.state import JobState
from tests.processes import is_alive
from tests.scheduler.local_cluster import LocalCluster
from tests.waiting import wait_until

BODY = """
    rc() { "$@"; echo "rc=$?"; }
"""


# Task 1 fails once the three others have set their traps.
FAIL_LAST = """if [ $SLURM_PROCID = 1 ]; then
    until [ -e up0 ] && [ -e up2 ] && [ -e up3 ]; do sleep 0.02; done; exit 7
fi; """


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path) as local_cluster:
        yield local_cluster


def lines(cluster: LocalCluster, body: str, *directives: str) -> list[str]:
    job = cluster.submit(BODY + "\n    " + body, *directives)
    assert cluster.wait(job).state is JobState.COMPLETED, cluster.output(job)
    return cluster.output(job).splitlines()


def last_line(cluster: LocalCluster, body: str, *directives: str) -> str:
    return lines(cluster, body, *directives)[-1]


def test_srun_sets_the_task_environment(cluster: LocalCluster) -> None:
    lines(
        cluster,
        "srun --output=t%t.%n.%N.%s.%j env",
        "--nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --gpus-per-node=2",
    )
    result = {}
    for task in range(4):
        node = task // 2
        text = (cluster.folder / f"t{task}.{node}.local{node + 1}.0.1").read_text()
        result[task] = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "local[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    for task, env in result.items():
        assert {name: env.get(name) for name in common} == common
        assert env["SLURM_PROCID"] == str(task)
        assert env["SLURM_LOCALID"] == str(task % 2)
        assert env["SLURM_NODEID"] == str(task // 2)
        assert env["SLURMD_NODENAME"] == f"local{task // 2 + 1}"
    assert len({env["SLURM_TASK_PID"] for env in result.values()}) == 4


def test_slurm_task_pid_is_the_pid_of_the_task(cluster: LocalCluster) -> None:
    assert last_line(cluster, "srun -n1 bash -c '[ $SLURM_TASK_PID = $$ ] && echo same'") == "same"


@pytest.mark.parametrize(
    ("options", "body", "code"),
    [
        ("", "exit $SLURM_PROCID", 3),
        ("", "kill -9 $$", 137),
        ("", "if [ $SLURM_PROCID = 1 ]; then kill -USR1 $$; fi; exit 200", 138),
        ("-K1", "[ $SLURM_PROCID = 1 ] && exit 7; exec sleep 60", 143),
        ("-K", "[ $SLURM_PROCID = 1 ] && exit 7; exec sleep 60", 143),
        ("--kill-on-bad-exit", FAIL_LAST + 'trap "exit 3" TERM; touch up$SLURM_PROCID; sleep 60 & wait', 7),
        ("-K1", FAIL_LAST + 'trap "" TERM; touch up$SLURM_PROCID; sleep 60', 137),
        ("--wait=1", "[ $SLURM_PROCID = 1 ] && exit 0; exec sleep 60", 137),
        ("-K0", "[ $SLURM_PROCID = 1 ] && exit 7; sleep 0.3", 7),
        ("-K1 --no-kill -W1", "[ $SLURM_PROCID = 1 ] && exit 7; sleep 1.5", 7),
    ],
)
def test_srun_exit_code_follows_failed_and_killed_tasks(
    cluster: LocalCluster, options: str, body: str, code: int
) -> None:
    assert last_line(cluster, f"rc srun {options} bash -c '{body}'", "-N2 -n4") == f"rc={code}"


@pytest.mark.parametrize("name", ["USR1", "USR2", "TERM", "INT", "HUP", "CONT"])
def test_srun_forwards_signals_to_every_process_of_the_step(cluster: LocalCluster, name: str) -> None:
    result = lines(
        cluster,
        f"""
        srun bash -c 'trap "echo task" {name}; (trap "echo child; exit" {name}
                      echo up; sleep 60 & wait) & child=$!; wait; wait $child; exit 9' & p=$!
        until [ $(grep -c up job-1.out) = 2 ]; do sleep 0.02; done; sleep 0.1
        kill -{name} $p; wait $p; echo rc=$?
        """,
        "-n2",
    )
    assert result.count("task") == 2
    assert result.count("child") == 2
    assert result[-1] == "rc=9"


def test_killed_srun_ends_its_tasks(cluster: LocalCluster) -> None:
    job = cluster.submit(
        """
        srun -n1 bash -c 'echo pid=$$; exec sleep 60' & wait $!; echo rc=$?
        until [ -e go ]; do sleep 0.02; done
        """
    )
    cluster.saw(job, "pid=")
    pid = int(cluster.output(job).split("pid=")[1])
    (step,) = (cluster.folder / "state" / "jobs" / job / "steps").glob("0")
    os.kill(int(json.loads(step.read_text())["pid"]), 9)
    wait_until(lambda: not is_alive(pid), "the task's end")
    (cluster.folder / "go").touch()
    assert cluster.wait(job).ok
    assert "rc=137" in cluster.output(job)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["0 0 local1 4", "1 1 local1 4", "2 0 local2 4", "3 1 local2 4"]),
        ("-m cyclic", ["0 0 local1 4", "1 0 local2 4", "2 1 local1 4", "3 1 local2 4"]),
        ("-m block:cyclic", ["0 0 local1 4", "1 1 local1 4", "2 0 local2 4", "3 1 local2 4"]),
        ("--distribution=*:block", ["0 0 local1 4", "1 1 local1 4", "2 0 local2 4", "3 1 local2 4"]),
        ("-n2", ["0 0 local1 2", "1 0 local2 2"]),
        ("-N2 --ntasks=2", ["0 0 local1 2", "1 0 local2 2"]),
        ("-n 2 --ntasks-per-node=1", ["0 0 local1 2", "1 0 local2 2"]),
        ("-N1 -n2", ["0 0 local1 2", "1 1 local1 2"]),
        ("-N1 -n1 -w local2", ["0 0 local2 1"]),
        ("-N2 -n2 -w local2,local2", ["0 0 local1 2", "1 0 local2 2"]),
        ("-N1 -n1 -x local1", ["0 0 local2 1"]),
        ("-Q -n1", ["0 0 local1 1"]),
    ],
)
def test_srun_places_tasks_by_distribution(cluster: LocalCluster, options: str, expected: list[str]) -> None:
    command = "bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME $SLURM_NTASKS'"
    result = lines(cluster, f"srun {options} {command}", "-N2 --ntasks-per-node=2")
    assert sorted(line for line in result if not line.startswith("srun: Warning")) == expected


def test_srun_prints_the_warnings_of_slurm(cluster: LocalCluster) -> None:
    result = lines(cluster, "srun -n1 true; srun --ntasks-per-node=1 echo x", "-N2 --ntasks-per-node=2")
    assert result[0] == "srun: Warning: can't run 1 processes on 2 nodes, setting nnodes to 1"
    assert "Ignoring --ntasks-per-node" in result[1]
    assert result[2:] == ["x"] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--bogus=3 true", "srun: error: the embedded scheduler's srun does not offer the option --bogus"),
        ("-Z true", "does not offer the option -Z"),
        ("--pty bash", "does not offer the option --pty"),
        ("", "srun: No command given to execute."),
        (
            "-n 99 true",
            "srun: error: Unable to create step for job 1: More processors requested than permitted",
        ),
        ("-N3 true", "srun: error: Only allocated 2 nodes asked for 3"),
        ("-w local7 -N1 -n1 true", "not in this job's allocation"),
        ("-n x true", "Invalid --ntasks specification"),
        ("-W x true", "Invalid --wait specification"),
        ("-m arbitrary true", "does not offer --distribution=arbitrary"),
        ("-o /nonexistent/x true", "Could not open file /nonexistent/x"),
        ("--gpus-per-node=9 true", "Invalid generic resource (gres) specification"),
        ("--gpu-bind=mask_gpu:1 true", "does not offer --gpu-bind=mask_gpu:1"),
    ],
)
def test_srun_refuses_unsupported_and_invalid_options(
    cluster: LocalCluster, options: str, words: str
) -> None:
    result = lines(cluster, f"rc srun {options}", "-N2")
    assert words in result[-2]
    assert result[-1] == "rc=1"


def test_srun_reports_a_program_that_cannot_run(cluster: LocalCluster) -> None:
    (cluster.folder / "plain").write_text("")
    result = lines(cluster, "rc srun -n1 no-such-program; rc srun -n1 ./plain")
    assert result[0] == "slurmstepd-local1: error: execve(): no-such-program: No such file or directory"
    assert result[2] == "rc=2"
    assert result[3] == "slurmstepd-local1: error: execve(): ./plain: Permission denied"
    assert result[5] == "rc=13"


def test_srun_writes_output_files_by_pattern(cluster: LocalCluster) -> None:
    lines(
        cluster,
        """
        srun -o out.%J.%A.%a.%4t.%x.%% -e err.%t bash -c 'echo out; echo err >&2'
        srun -n1 -o both bash -c 'echo one; echo two >&2'
        srun -n1 -o both --open-mode=append echo three
        srun -n1 -o cut echo long-long; srun -n1 -o cut echo short
        srun -n2 -o 1 bash -c 'echo only $SLURM_PROCID'; srun -n1 -o none echo nowhere
        """,
        "-n2",
    )
    folder = cluster.folder
    for task in (0, 1):
        assert (folder / f"out.1.0.1.4294967294.000{task}.job.%").read_text() == "out\n"
        assert (folder / f"err.{task}").read_text() == "err\n"
    assert (folder / "both").read_text() == "one\ntwo\nthree\n"
    assert (folder / "cut").read_text() == "short\n"
    assert cluster.output("1") == "only 1\n"


def test_srun_labels_output_lines_with_the_task(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        "srun -l bash -c 'echo out; echo err >&2; printf unfinished'; srun -n1 -l -o f printf 'a\\nb'",
        "-n2",
    )
    assert sorted(result) == ["0: err", "0: out", "0: unfinished", "1: err", "1: out", "1: unfinished"]
    assert (cluster.folder / "f").read_text() == "0: a\n0: b\n"


def test_labelled_output_of_an_ended_step_is_complete(cluster: LocalCluster) -> None:
    result = lines(cluster, "srun -l seq 30000", "-n2")
    assert len(result) == 60000
    assert [line for line in result if line.startswith("1: ")][-1] == "1: 30000"


def test_srun_distributes_standard_input(cluster: LocalCluster) -> None:
    (cluster.folder / "in.0").write_text("zero\n")
    (cluster.folder / "in.1").write_text("one\n")
    body = """
        srun cat; echo nothing
        echo piped | srun cat; echo -
        echo all | srun -i none cat; echo -
        echo single | srun -i 1 cat; echo -
        srun -n1 cat <in.0; echo -
        srun -i in.%t cat | sort; echo -
        seq 200000 | srun -n2 bash -c 'sum=$(md5sum); echo $sum'
    """
    result = lines(cluster, body, "-n2")
    digest = subprocess.run(
        "seq 200000 | md5sum", shell=True, capture_output=True, text=True, check=True
    ).stdout
    assert result == [
        "nothing", "piped", "piped", "-", "-", "single", "-", "zero", "-", "one", "zero", "-",
        digest.strip().replace("  ", " "), digest.strip().replace("  ", " "),
    ]  # fmt: skip


def test_srun_exports_variables_by_option(cluster: LocalCluster) -> None:
    show = "/bin/bash -c 'echo a=$A b=$B f=$FOO home=$HOME id=$SLURM_PROCID'"
    result = lines(
        cluster,
        f"""
        export B=5 FOO=6
        srun {show}
        srun --export=A=1,B {show}
        srun --export=NONE {show}
        srun --export=ALL,A=2 {show}
        export SLURM_EXPORT_ENV=NONE
        srun {show}
        rc srun bash -c true
        """,
    )
    home = os.environ["HOME"]
    assert result[:5] == [
        f"a= b=5 f=6 home={home} id=0",
        "a=1 b=5 f= home= id=0",
        "a= b= f= home= id=0",
        f"a=2 b=5 f=6 home={home} id=0",
        "a= b= f= home= id=0",
    ]
    assert result[-1] == "rc=2"  # as in Slurm, without PATH no program is found


def test_export_none_directive_applies_to_srun(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        "export A=1\nrc srun bash -c true\nexport SLURM_EXPORT_ENV=ALL\nsrun bash -c 'echo a=$A'",
        "--export=NONE",
    )
    assert result[-2:] == ["rc=2", "a=1"]


def test_srun_accepts_other_options(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        """
        srun -D / -J other -u --mpi=none --cpu-bind=verbose,cores --exact -v -c 1 \\
             bash -c 'echo $PWD $SLURM_JOB_NAME'
        rc srun -n1 --mpi=pmix true
        rc srun -D /nonexistent pwd
        SRUN_CPUS_PER_TASK=3 srun bash -c 'echo cpus=$SLURM_CPUS_PER_TASK'
        SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=30 rc srun -n1 bash -c 'exit 4'
        """,
        "-N1 -c4",
    )
    assert result[0] == "/ other"
    assert "--mpi=pmix has no effect" in result[1]
    assert result[2] == "rc=0"
    assert "couldn't chdir to `/nonexistent'" in result[3]
    assert result[4:6] == ["/tmp", "rc=0"]
    assert result[6] == "cpus=3"
    assert result[-1] == "rc=4"


def test_srun_binds_gpus_to_tasks(cluster: LocalCluster) -> None:
    show = "bash -c 'echo $SLURM_PROCID:$CUDA_VISIBLE_DEVICES' | sort | xargs"
    result = lines(
        cluster,
        f"""
        srun --gpu-bind=none {show}
        srun --gpu-bind=single:1 {show}
        srun --gpu-bind=per_task:2 {show}
        srun --gpu-bind=map_gpu:3,1 {show}
        srun --gres=gpu:3 {show}
        srun --gpus-per-node=a100:2 {show}
        """,
        "-n2 --gpus-per-node=4",
    )
    assert result == [
        "0:0,1,2,3 1:0,1,2,3", "0:0 1:1", "0:0,1 1:2,3", "0:3 1:1", "0:0,1,2 1:0,1,2", "0:0,1 1:0,1",
    ]  # fmt: skip


def test_steps_wait_for_each_other_unless_overlap_is_allowed(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        """
        srun -N1 -n1 bash -c 'echo first-up; until [ -e go ]; do sleep 0.02; done; echo first-down' &
        until grep -q first-up job-1.out; do sleep 0.02; done
        srun -n1 --overlap bash -c 'echo overlapping $SLURM_STEP_ID'
        srun -n1 echo second &
        until grep -q 'nodes are busy' job-1.out; do sleep 0.02; done
        touch go; wait
        srun -n1 --exact sleep 0.4 & srun -n1 --exact echo beside & wait
        """,
        "-n2",
    )
    assert result[:5] == [
        "first-up",
        "overlapping 1",
        "srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)",
        "first-down",
        "srun: Step created for job 1",
    ]
    assert result[5:] == ["second", "beside"]


def test_cancelled_srun_stops_waiting_for_a_step(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        """
        srun --exact bash -c 'until [ -e go ]; do sleep 0.02; done' & first=$!
        until [ -e state/jobs/1/steps/0 ]; do sleep 0.02; done; sleep 0.1
        srun true & second=$!
        until grep -q 'nodes are busy' job-1.out; do sleep 0.02; done
        kill $second; rc wait $second; touch go; wait $first
        """,
    )
    assert result[-2:] == ["srun: error: Cancelled pending job step", "rc=1"]


def test_srun_outside_a_job_is_refused(cluster: LocalCluster) -> None:
    cluster.run("true")
    (program,) = (cluster.folder / "state" / "bin").glob("*/srun")
    done = subprocess.run(
        [program, "true"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert done.returncode == 1
    assert "works only inside one of its jobs" in done.stderr


def test_scontrol_shows_hostnames_and_jobs(cluster: LocalCluster) -> None:
    result = lines(
        cluster,
        """
        scontrol show hostnames | xargs
        scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1
        scontrol show hostnames 'a[01-03,7],b' | xargs
        rc scontrol update job=1
        rc scontrol show hostnames 'a['
        rc scontrol requeue 99
        rc scontrol show job 99
        scontrol show job $SLURM_JOB_ID
        scontrol show job | grep JobId
        """,
        "-N3 --comment=hi",
    )
    assert result[:3] == ["local1 local2 local3", "local1", "a01 a02 a03 a7 b"]
    assert result[3].startswith(
        "scontrol: error: the embedded scheduler's scontrol does not offer 'update job=1'; it"
    )
    assert result[4] == "rc=1"
    assert result[5:9:2] == [
        "scontrol: error: invalid node list 'a['",
        "scontrol: error: Invalid job id specified: 99",
    ]
    assert result[6] == result[8] == result[10] == "rc=1"
    shown = "\n".join(result[11:])
    for words in ("JobId=1 JobName=job", "JobState=RUNNING Reason=None", "NodeList=local[1-3]", "NumNodes=3",
                  "TimeLimit=UNLIMITED", "Comment=dtslurm:t0k3n"):  # fmt: skip
        assert words in shown
    assert result[-1] == "JobId=1 JobName=job"
