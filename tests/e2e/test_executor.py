"""submitit's API on every kind of cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli
from tests.waiting import busyness

FUNCTIONS = '''\
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import submitit

import dtslurm.executor


def add(a, b):
    print("adding", a, b)
    return a + b


def whoami():
    here = submitit.JobEnvironment()
    return here.global_rank, here.num_tasks, here.local_rank, here.node, here.job_id


def noisy():
    print("to out")
    print("to err", file=sys.stderr)


def read_variables(*names):
    return [os.environ.get(name) for name in names]


def everywhere():
    place = submitit.helpers.TorchDistributedEnvironment().export()
    child = "from functions import *; print(submitit.JobEnvironment().cluster, *whoami()[::4])"
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(whoami)
    shared = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return said.split(), spawned == whoami(), shared, f"{place.master_addr}:{place.master_port}"


def reduced():
    import torch

    torch.distributed.init_process_group("gloo")
    value = torch.ones(1) * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(value)
    torch.distributed.destroy_process_group()
    return value.item()


def fail():
    raise ValueError("no such thing as a free lunch")


def fail_on_the_second():
    if submitit.JobEnvironment().global_rank == 1:
        fail()
    time.sleep(300)


class LateOnTheSecond:
    """Unpickled late by task 1, which a SIGTERM ends until then: submitit handles signals afterwards."""

    def __reduce__(self):
        return eval, ("__import__('time').sleep(3 * (__import__('os').environ['RANK'] == '1'))",)


def fail_unless_first(_argument):
    if rank := submitit.JobEnvironment().global_rank:
        raise ValueError(f"failure of task {rank}")


def sleep_long():
    print("began", flush=True)
    time.sleep(300)


class Lock:
    def __reduce__(self):
        raise TypeError("cannot pickle a lock")


def raise_lock():
    error = ValueError("held")
    error.lock = Lock()
    raise error


class Count(submitit.helpers.Checkpointable):
    def __init__(self, folder):
        self.folder, self.start = Path(folder), 0

    def __call__(self, last):
        print("attempt", os.environ["DTSLURM_ATTEMPT"], flush=True)
        for step in range(self.start, last):
            self.start = step
            (self.folder / "at").write_text(str(step))
            while step == 3 and not (self.folder / "go").exists():
                time.sleep(0.1)
        return self.start, os.environ["DTSLURM_ATTEMPT"]


def executor(**options):
    made = submitit.AutoExecutor("logs/%j", cluster="dtslurm", dtslurm_profile=sys.argv[1])
    given = {"name": "functions", "timeout_min": 5, "dtslurm_python": sys.executable, **options}
    made.update_parameters(**given)
    return made


def output_with(read, text):
    """Wait for the text, because the result is there before the last output is written."""
    deadline = time.time() + 300
    while text not in (read() or "") and time.time() < deadline:
        time.sleep(0.1)
    return read()


def stdout_with(job, text):
    return output_with(job.stdout, text)


def tell(**values):
    print(json.dumps(values))
'''


def run(cli: Cli, text: str, *, code: int | None = 0, path: str = "") -> dict[str, Any]:
    """Run a program that imports the functions; return what it tells, and its stderr."""
    cli.script(FUNCTIONS, "functions.py")
    return cli.python("from functions import *\n" + textwrap.dedent(text), code=code, path=path)


def test_functions_return_their_results(cli: Cli) -> None:
    result = run(
        cli,
        """
        ex = executor()
        one = ex.submit(add, 1, b=2)
        many = ex.map_array(add, range(4), range(4))
        with ex.batch():
            later = [ex.submit(add, number, 10) for number in range(2)]
        tell(one=one.result(), many=[job.result() for job in many], later=[job.result() for job in later],
             ids=[job.job_id for job in many], out=stdout_with(many[2], "adding"), done=one.done(),
             state=one.state)
        """,
    )
    assert result["one"] == 3
    assert result["many"] == [0, 2, 4, 6]
    assert result["later"] == [10, 11]
    array = result["ids"][0].partition("_")[0]
    assert result["ids"] == [f"{array}_{number}" for number in range(4)]
    assert result["done"]
    assert "adding 2 2" in result["out"]


def test_exception_is_returned_with_its_traceback(cli: Cli) -> None:
    result = run(
        cli,
        """
        job, odd = executor().map_array(lambda run: run(), [fail, raise_lock])
        tell(error=str(job.exception()), odd=str(odd.exception()), kind=type(job.exception()).__name__)
        """,
    )
    assert "ValueError: no such thing as a free lunch" in result["error"]
    assert 'raise ValueError("no such thing as a free lunch")' in result["error"]
    assert result["kind"] == "FailedJobError"
    assert "ValueError: held" in result["odd"]


@WITHOUT_SSH
def test_job_error_is_the_error_of_the_task_that_failed_first(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor(tasks_per_node=3).submit(fail_on_the_second)
        begin = time.monotonic()
        kind, error = type(job.exception()).__name__, str(job.exception())
        try:
            job.results()
        except Exception as raised:
            same = str(raised) == error
        tell(kind=kind, error=error, same=same, seconds=time.monotonic() - begin)
        """,
    )
    assert result["kind"] == "FailedJobError"
    assert "ValueError: no such thing as a free lunch" in result["error"]
    assert result["same"]
    assert (
        result["seconds"] < 80
    )  # 10 s for task 0, 30 s for its end; the other two are not waited for: they get no result


@WITHOUT_SSH
def test_job_error_is_the_error_of_the_lowest_of_the_tasks_that_fail_together(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor(tasks_per_node=3).submit(fail_unless_first, LateOnTheSecond())
        tell(error=str(job.exception()))
        """,
    )
    assert "ValueError: failure of task 1" in result["error"]


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_result_that_does_not_fit_on_the_disk_is_reported(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor(dtslurm_setup=["ulimit -f 200"]).submit(bytes, 5_000_000)
        tell(error=str(job.exception()), kind=type(job.exception()).__name__)
        """,
    )
    assert result["kind"] == "FailedJobError"
    assert "File too large" in result["error"]


@WITHOUT_SSH
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_have_their_job_environment_and_communicate(cli: Cli, launcher: str) -> None:
    result = run(
        cli,
        f"""
        ex = executor(nodes=2, tasks_per_node=2, dtslurm_launcher={launcher!r})
        places, sums = ex.submit(whoami), ex.submit(reduced)
        tell(places=places.results(), sums=sums.results(), id=places.job_id)
        """,
    )
    job = result["id"]
    assert result["places"] == [[0, 4, 0, 0, job], [1, 4, 1, 0, job], [2, 4, 0, 1, job], [3, 4, 1, 1, job]]
    assert result["sums"] == [10.0] * 4


@WITHOUT_SSH
def test_submitit_helpers_work_in_ranks_and_child_processes(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor(tasks_per_node=2).submit(everywhere)
        tell(ranks=job.results(), id=job.job_id, logs=[job.stderr()])
        """,
    )
    for rank, (said, spawned, shared, address) in enumerate(result["ranks"]):
        assert said == ["dtslurm", str(rank), result["id"]]
        assert spawned
        assert shared == [str(rank), "2", str(rank), "2"]
        assert address == result["ranks"][0][3]


@WITHOUT_SSH
def test_function_receives_only_named_variables(cli: Cli) -> None:
    result = run(
        cli,
        """
        os.environ.update(COPIED="here", NOT_NAMED="here")
        job = executor(dtslurm_env=["COPIED", "SET=3"]).submit(read_variables, "COPIED", "SET", "NOT_NAMED")
        tell(values=job.result())
        """,
    )
    assert result["values"] == ["here", "3", None]


def test_stdout_and_stderr_are_separate_unless_merged(cli: Cli) -> None:
    result = run(
        cli,
        """
        apart, together = executor().submit(noisy), executor(stderr_to_stdout=True).submit(noisy)
        for job in (apart, together):
            job.result()
        stdout_with(together, "to err")
        tell(apart=[stdout_with(apart, "to out"), output_with(apart.stderr, "to err")],
             together=[together.stdout(), together.stderr()],
             paths=[apart.paths.stdout.exists(), apart.paths.stderr.exists(), together.paths.stderr.exists()],
             id=apart.job_id)
        """,
    )
    out, err = (text.splitlines() for text in result["apart"])
    assert [line for line in out if line.startswith("to ")] == ["to out"]
    assert err == ["to err"]
    assert {"to out", "to err"} <= set(result["together"][0].splitlines())
    assert result["together"][1] is None
    if cli.cluster != "far":  # paths of another machine are not here
        assert result["paths"] == [True, True, False]
    log = cli("logs", result["id"]).stdout
    assert "to out" in log
    assert "to err" in log


@WITHOUT_SSH
def test_output_is_complete_when_the_result_is_there(cli: Cli) -> None:
    cli.script('#!/bin/bash\nsleep 2\nexec /usr/bin/tee "$@"\n', "tee")  # it copies the streams late
    (cli.folder / "tee").chmod(0o755)
    result = run(
        cli,
        f"""
        job = executor(dtslurm_setup=["export PATH={cli.folder}:$PATH"]).submit(noisy)
        job.result()
        tell(out=job.stdout(), err=job.stderr())
        """,
    )
    assert "to out" in result["out"]
    assert "to err" in result["err"]


def test_job_is_recreated_from_its_folder_and_id(cli: Cli) -> None:
    result = run(cli, "tell(id=executor().submit(add, 20, 3).job_id)")
    again = run(
        cli,
        f"""
        job = dtslurm.executor.DtslurmJob("logs/%j", {result["id"]!r})
        tell(result=job.result(), state=job.state, out=stdout_with(job, "adding"), run=job.record.job_id)
        """,
    )
    assert (again["result"], again["run"]) == (23, result["id"])
    assert again["state"] in {"RUNNING", "COMPLETED"}  # the result is there before the job is over
    assert "adding 20 3" in again["out"]
    stderr = run(cli, 'dtslurm.executor.DtslurmJob("logs/%j", "987654").result()', code=1)["stderr"]
    assert "no run '987654' is known on this machine" in stderr


@WITHOUT_SSH
def test_pickled_job_can_be_cancelled(cli: Cli) -> None:
    result = run(
        cli,
        """
        import pickle
        job = executor().submit(time.sleep, 300)
        copy = pickle.loads(pickle.dumps(job))
        copy.cancel()
        while not job.done(force_check=True):
            time.sleep(0.5)
        job._results_timeout_s = 0
        tell(state=job.state, kind=type(job.exception()).__name__, same=copy.job_id == job.job_id)
        """,
    )
    assert result["state"].startswith("CANCELLED")
    assert result["kind"] == "UncompletedJobError"
    assert result["same"]


@ON_SLURM
def test_cancelled_job_is_done_before_slurm_kills_its_processes(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor().submit(sleep_long)  # submitit has it ignore TERM, so that it lives until KillWait
        while "began" not in (job.stdout() or ""):
            time.sleep(0.1)
        begin = time.monotonic()
        job.cancel()
        while not job.done():
            time.sleep(0.05)
        tell(seconds=time.monotonic() - begin, state=job.state)
        """,
    )
    assert result["state"] == "CANCELLED"
    assert result["seconds"] < min(9, 3 * busyness())  # Slurm kills them after 10 s


@WITHOUT_SSH
def test_function_that_exits_without_a_result_is_reported_without_a_wait(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor().submit(os._exit, 3)
        job._results_timeout_s = 0
        tell(kind=type(job.exception()).__name__, state=job.state, told=str(job.exception()))
        """,
    )
    assert (result["kind"], result["state"]) == ("UncompletedJobError", "FAILED")
    assert "has not produced any output" in result["told"]


@WITHOUT_SSH
def test_tasks_that_exit_without_a_result_are_reported_without_a_wait(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = executor(tasks_per_node=2).submit(os._exit, 3)
        for task in job._sub_jobs:
            task._results_timeout_s = 0
        tell(kind=type(job.exception()).__name__, tasks=[task.done() for task in job._sub_jobs])
        """,
    )
    assert result["kind"] == "UncompletedJobError"
    assert result["tasks"] == [True, True]


@ON_SLURM
def test_second_submission_runs_only_sbatch(cli: Cli, tmp_path: Path) -> None:
    shims, calls = tmp_path / "shims", tmp_path / "calls"
    shims.mkdir()
    path = cli.env.get("PATH", os.environ["PATH"])
    for name in ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "sacctmgr", "srun"):
        (shims / name).write_text(
            f'#!/bin/sh\necho {name} >>{calls}\nexec {shutil.which(name, path=path)} "$@"\n'
        )
        (shims / name).chmod(0o755)
    cli.env["PATH"] = f"{shims}:{path}"
    result = run(
        cli,
        f"""
        ex, calls = executor(dtslurm_setup=["PATH={path}"]), Path({str(calls)!r})
        first = ex.submit(add, 1, 2)
        before = calls.read_text().split()
        second = ex.submit(add, 2, 3)
        after = calls.read_text().split()[len(before):]
        tell(before=before, after=after, results=[first.result(), second.result()])
        """,
    )
    assert result["results"] == [3, 5]
    assert {"scontrol", "sbatch"} <= set(result["before"])
    assert result["after"] == ["sbatch"]


@WITHOUT_SSH
@pytest.mark.parametrize("timeout", [True, False])
def test_checkpointed_function_continues_after_an_interruption(cli: Cli, timeout: bool) -> None:
    result = run(
        cli,
        f"""
        job = executor().submit(Count("."), 6)
        at = Path("at")
        while not (at.exists() and at.read_text() == "3"):
            time.sleep(0.2)
        job._interrupt(timeout={timeout})
        out = stdout_with(job, "attempt 1")
        Path("go").touch()
        tell(result=job.result(), out=out)
        """,
    )
    assert result["result"] == [5, "1"]
    assert [line for line in result["out"].splitlines() if line.startswith("attempt")] == [
        "attempt 0",
        "attempt 1",
    ]


@pytest.mark.parametrize("cli", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("executor().submit(add, Lock(), 1)", "cannot pickle a lock"),
        ("executor(nodess=2)", "nodess"),
        ("executor(dtslurm_nodess=2)", "Unknown argument 'nodess'"),
        ("dtslurm.Executor('logs').update_parameters(nodess=2)", "did you mean 'nodes'"),
        ("dtslurm.Executor('logs', profile='nowhere').submit(add, 1, 2)", "no cluster profile 'nowhere'"),
        (
            "dtslurm.Executor('logs', profile='local', max_pickle_size_gb=1e-6).submit(add, 'x' * 9999, 1)",
            "max_pickle_size_gb",
        ),
    ],
)
def test_unsendable_function_or_option_is_refused_before_submission(
    cli: Cli, text: str, message: str
) -> None:
    stderr = run(cli, text, code=1)["stderr"]
    assert message in stderr.strip().rpartition("Traceback")[2]
    assert not (Path(cli.env["DTSLURM_RUN_ROOT"])).exists()


@pytest.mark.slurm
@pytest.mark.parametrize("cli", ["far"], indirect=True)
def test_unsuitable_remote_python_is_reported_before_submission(cli: Cli, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho \'{"python": "3.7.9", "submitit": "", "cloudpickle": "1.6.0"}\'\n')
    other.chmod(0o755)
    stderr = run(cli, f"executor(dtslurm_python={str(other)!r}).submit(add, 1, 2)", code=1)["stderr"]
    assert "3.7.9" in stderr
    assert "has no submitit; run pip install submitit==" in stderr
    assert "cloudpickle is" in stderr


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_oldest_supported_submitit_works(cli: Cli, tmp_path: Path) -> None:
    folder = str(tmp_path / "old")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--target", folder, "--no-deps", "submitit==1.5.0", "setuptools<80"],
        check=True,
        capture_output=True,
    )
    result = run(
        cli,
        """
        jobs = executor(tasks_per_node=2).map_array(add, [1, 2], [3, 4])
        tell(sums=[job.results() for job in jobs], version=submitit.__version__)
        """,
        path=folder,
    )
    assert result["sums"] == [[4, 4], [6, 6]]
    assert result["version"] == "1.5.0"


@WITHOUT_SSH
def test_hydra_multirun_is_a_single_array(cli: Cli) -> None:
    cli.script(
        """
        import hydra

        @hydra.main(version_base=None, config_path=None)
        def main(config):
            print("lr", config.lr)
            return config.lr * 2

        main()
        """,
        "app.py",
    )
    argv = [sys.executable, "app.py", "-m", "hydra/launcher=dtslurm", f"hydra.launcher.cluster={cli.cluster}"]
    done = subprocess.run(
        [*argv, "hydra.launcher.timeout_min=5", "hydra.sweep.dir=sweep", "+lr=1,2,3"],
        cwd=cli.folder,
        env={**os.environ, **cli.env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for number in range(3):
        overrides = (cli.folder / "sweep" / str(number) / ".hydra" / "overrides.yaml").read_text()
        assert overrides == f"- +lr={number + 1}\n"
    assert len(list(Path(cli.env["DTSLURM_RUN_ROOT"]).glob("*/script.sbatch"))) == 1
