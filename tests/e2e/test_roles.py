"""Runs with several roles: servers beside a trainer, and the faults that they survive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.rundir import RunDir
from dtslurm.worker.supervisor.roles.plan import first_port
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli, command_line, events_of
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software
from tests.waiting import busyness

EXAMPLE = Path(__file__).parents[2] / "examples" / "roles"
SERVER = (EXAMPLE / "generator.py").read_text()
# A main role without torch, for tests of everything but training.
WAITER = "import sys, time\nprint('args', *sys.argv[1:], flush=True)\ntime.sleep(600)\n"
JOB = """\
job_name: train
time: 10
variables: {{python: "{python}"}}
roles:
  trainer: {{script: {script}, python: "{python}", nodes: {nodes}, ntasks_per_node: {ranks},
             launcher: {launcher}, args: ["${{role.rollout.urls}}"]}}
  rollout: {{command: ["${{python}}", serve.py, "${{port.http}}"], {keys}, metrics: /metrics,
             ready: {{http: /health, within: 1m, silence: 8s}}}}
"""


# A trainer that registers four checkpoints, three of them just before it ends.
CHECKPOINTING = """\
import json, os, time
for step in range(1, 5):
    while step == 2 and not os.path.exists(os.path.join(os.environ["DTSLURM_RUN_DIR"], "evaluations.jsonl")):
        time.sleep(0.1)  # the first one is evaluated during the training
    path = os.path.join(os.environ["DTSLURM_CHECKPOINT_DIR"], f"step-{step}")
    os.makedirs(path)
    with open(os.environ["DTSLURM_ARTIFACTS"], "a") as register:
        entry = {"path": f"checkpoints/step-{step}", "kind": "checkpoint", "step": step}
        register.write(json.dumps(entry) + "\\n")
"""
EVALUATED = """\
job_name: train
time: 10
roles:
  trainer: {{script: train.py, launcher: srun, python: "{python}"}}
  evaluator:
    extends: evaluator
    args: ["{python}", eval.py, "{{checkpoint}}"]
    on: trainer
    instances: 2
"""
# A trainer with two of four GPUs, beside two instances with a GPU each and one that needs none.
WITH_GPUS = """\
job_name: train
time: 10
gpus_per_node: 4
roles:
  trainer: {{script: gpus.py, launcher: srun, python: "{python}", ntasks_per_node: 2}}
  judge:
    command: [bash, -c, 'echo "GPUs $CUDA_VISIBLE_DEVICES."; sleep 600']
    on: trainer
    gpus: 1
    instances: 2
    ready: {{line: '^GPUs '}}
  clock:
    command: [bash, -c, 'echo "GPUs $CUDA_VISIBLE_DEVICES."; sleep 600']
    on: trainer
    gpus: 0
    ready: {{line: '^GPUs '}}
"""


# A server that torchrun starts on each node of an instance. It answers as soon as all nodes have joined.
SPANNING = """\
import http.server, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
names = [None] * dist.get_world_size()
dist.all_gather_object(names, (os.environ["SLURMD_NODENAME"], os.getppid()))
print("joined", *(f"{name}={pid}" for name, pid in names), flush=True)
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
if dist.get_rank() == 0:
    http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
dist.barrier()
"""
TWO_NODES_EACH = """\
job_name: train
time: 10
roles:
  trainer: {{script: wait.py, python: "{python}", launcher: srun}}
  rollout:
    extends: torchrun
    args: [--nproc-per-node=1, spanning.py, "${{port.http}}"]
    environment: "{environment}"
    nodes: 2
    nodes_per_instance: 2
    ready: {{http: /, within: 5m}}
"""


def write_job(cli: Cli, script: str, text: str, **values: Any) -> str:
    """Write a job file with a trainer and a role rollout, and return its name."""
    cli.script(SERVER, "serve.py")
    cli.script(text, script)
    defaults = {"nodes": 1, "ranks": 1, "launcher": "srun", "keys": "instances: 2", "python": sys.executable}
    return cli.script(JOB.format(script=script, **{**defaults, **values}), f"{script}.yaml")


def start(cli: Cli, *words: str) -> tuple[str, RunDir]:
    job = cli.submit(*words)
    return job, cli.run_dir(job)


def wait_for_events(cli: Cli, run: RunDir, name: str, count: int, limit: float = 60) -> list[dict[str, Any]]:
    cli.wait_until(lambda: len(events_of(run, name)) >= count, limit)
    return events_of(run, name)


def address(run: RunDir, instance: str, number: int = 0) -> dict[str, Any]:
    """Return the address of one start of an instance, such as ``rollout-0``."""
    values: dict[str, Any] = json.loads(
        (run.path / f"roles/{instance}/ranks/{number}/address.json").read_text()
    )
    return values


def losses(run: RunDir, attempt: int = 0) -> list[str]:
    text = (run.path / f"logs/{attempt}/rank-0.log").read_text()
    return [line for line in text.splitlines() if line.startswith("step ")]


def instances_of(cli: Cli, job: str, role: str = "rollout") -> list[dict[str, Any]]:
    roles = {item["name"]: item for item in cli.status(job).get("roles", [])}
    instances: list[dict[str, Any]] = roles[role]["instances"] if role in roles else []
    return instances


@WITHOUT_SSH
@pytest.mark.slow
def test_f91_killed_server_comes_back_and_the_losses_are_those_of_an_undisturbed_run(cli: Cli) -> None:
    shutil.copytree(EXAMPLE, cli.folder / "examples" / "roles")
    (cli.folder / "examples" / "roles" / "job.yaml").chmod(0o644)
    words = ("-N", "2", "--python", sys.executable, "examples/roles/job.yaml")
    undisturbed, undisturbed_run = start(cli, *words)
    job, run = start(cli, *words)
    cli.wait_until(lambda: (run.path / "logs/0/rank-0.log").exists() and len(losses(run)) > 3)
    os.kill(address(run, "generator-0")["pid"], signal.SIGKILL)
    killed_at = time.time()
    ready = wait_for_events(cli, run, "role_ready", 3)[2]
    assert ready["time"] - killed_at < 20 * busyness()
    assert (ready["role"], ready["instance"], ready["start"]) == ("generator", 0, 1)
    assert address(run, "generator-0", 1)["ports"] == address(run, "generator-0")["ports"]
    for name in (undisturbed, job):
        assert cli.wait_for_end(name)["statuses"][0]["state"] == "COMPLETED"
    assert len(losses(run)) == 40
    assert losses(run) == losses(undisturbed_run)
    [ended] = events_of(run, "role_ended")
    assert (ended["instance"], ended["exit_code"], ended["cause"]) == (0, 137, "killed")


def test_roles_are_shown_and_can_be_scaled(cli: Cli) -> None:
    job, _run = start(cli, write_job(cli, "wait.py", WAITER))
    cli.wait_until(lambda: [item["state"] for item in instances_of(cli, job)] == ["ready", "ready"])
    text = cli("status", job).stdout
    assert "rollout: 2 of 2 ready on " in text
    assert "rollout-0 is ready after" in text
    log = cli("logs", "--role", "rollout", job).stdout
    lines = sorted(line.rpartition(" ")[0] for line in log.splitlines())
    assert lines == [f"[rollout/{number}] generator {number} on port" for number in range(2)]
    assert "generator" not in cli("logs", job).stdout
    shown = cli("exec", job, "--role", "rollout", "--", "printenv", "DTSLURM_ROLE_INSTANCE").stdout
    assert sorted(shown.splitlines()) == ["[rollout/0] 0", "[rollout/1] 1"]
    assert cli("exec", job, "--role", "rollout/1", "printenv", "DTSLURM_ROLE_INSTANCE").stdout == "1\n"
    assert "no instance of rollout/7" in cli("exec", job, "--role", "rollout/7", "true", code=2).stderr
    assert "no such role; did you mean 'rollout'?" in cli("logs", "--role", "rolout", job, code=2).stderr
    assert "names no role; the run has rollout" in cli("logs", "--role", ",", job, code=2).stderr
    assert "main role by itself" in cli("logs", "--role", "trainer,rollout", job, code=2).stderr
    assert "requested: rollout=3" in cli("scale", job, "rollout=3").stderr
    cli.wait_until(lambda: [item["state"] for item in instances_of(cli, job)] == ["ready"] * 3)
    cli("scale", job, "rollout=1")
    cli.wait_until(lambda: "rollout: 1 of 1 ready" in cli("status", job).stdout)
    assert "no such role; did you mean 'rollout'?" in cli("scale", job, "rolout=1", code=2).stderr
    assert "ranks of the main role is fixed" in cli("scale", job, "trainer=2", code=2).stderr
    cli.wait_until(lambda: "requests/s, 0 waiting" in cli("status", job).stdout)
    cli("cancel", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    assert "has ended (CANCELLED)" in cli("scale", job, "rollout=2", code=2).stderr
    assert "rollout: ended" in cli("status", job).stdout


@ON_SLURM
def test_role_in_another_partition_is_a_component_of_a_heterogeneous_job(
    cli: Cli, slurm_lab: SlurmLab
) -> None:
    keys = "partition: short, gpus: 0, restarts: 1"
    job, run = start(cli, write_job(cli, "wait.py", WAITER, keys=keys))
    log = run.path / "logs/0/rank-0.log"
    cli.wait_until(lambda: log.exists() and "args" in log.read_text())
    components = slurm_lab.run(["squeue", "--noheader", "--format=%i %P %N", f"--jobs={job}"]).stdout.split()
    assert sorted(components[::3]) == [f"{job}+0", f"{job}+1"]
    assert sorted(components[1::3]) == ["main", "short"]
    server = address(run, "rollout-0")
    assert f"args http://{server['host']}:{server['ports']['http']}\n" in log.read_text()
    assert components[components.index("short") + 1] == server["node"]
    release = slurm_lab.version.split(".")
    if tuple(map(int, release[:2])) >= (22, 5):  # Slurm 20.11 starts no further step in such a component
        printed = cli("exec", job, "--role", "rollout/0", "printenv", "SLURM_JOB_PARTITION").stdout
        assert printed == "short\n"
    status = cli("status", job).stdout
    assert "2 parts" in status
    assert f"rollout: 1 of 1 ready on {server['node']}" in " ".join(status.split())
    os.kill(server["pid"], signal.SIGKILL)
    ready = wait_for_events(cli, run, "role_ready", 2)[1]
    assert (ready["node"], ready["start"]) == (server["node"], 1)
    os.kill(address(run, "rollout-0", 1)["pid"], signal.SIGKILL)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"
    assert events_of(run, "role_failed")[0]["reason"] == "its restarts are used up (1)"
    assert "of role rollout on" in cli("diagnose", job).stdout


@ON_SLURM
def test_components_of_a_heterogeneous_job_are_requeued_and_cancelled_together(
    cli: Cli, slurm_lab: SlurmLab
) -> None:
    keys = "partition: short, gpus: 0"
    job_file = write_job(cli, "wait.py", WAITER, keys=keys)
    job, run = start(cli, "--max-restarts", "1", job_file)
    cli.wait_until((run.path / "logs/0/rank-0.log").exists)
    slurm_lab.run(["scontrol", "requeue", job])
    cli.wait_until((run.path / "logs/1/rank-0.log").exists, 120)
    assert address(run, "rollout-0", 1)["ports"]["http"]  # the requeue itself restarted no server
    cli("cancel", job)
    assert {item["state"] for item in cli.wait_for_end(job)["statuses"]} == {"CANCELLED"}
    cli.wait_until(lambda: not slurm_lab.run(["squeue", "--noheader", f"--jobs={job}"]).stdout.strip())


@WITHOUT_SSH
def test_f92_stopped_server_is_noticed_and_end_of_the_trainer_frees_the_nodes(cli: Cli) -> None:
    job, run = start(cli, write_job(cli, "wait.py", WAITER))
    wait_for_events(cli, run, "attempt", 1)
    cli.wait_until((run.path / "logs/0/rank-0.log").exists)
    os.kill(address(run, "rollout-1")["pid"], signal.SIGSTOP)
    [ended] = wait_for_events(cli, run, "role_ended", 1)
    assert (ended["instance"], ended["cause"]) == (1, "unresponsive")
    assert "did not respond for" in ended["summary"]
    wait_for_events(cli, run, "role_ready", 3)
    os.kill(json.loads((run.path / "ranks/0/0.json").read_text())["pid"], signal.SIGKILL)
    killed_at = time.time()
    last = wait_for_events(cli, run, "ended", 1)[-1]
    assert last["time"] - killed_at < 20 * busyness()
    for instance in ("rollout-0", "rollout-1"):
        pid = address(run, instance, len(list((run.path / f"roles/{instance}/ranks").iterdir())) - 1)["pid"]
        cli.wait_until(lambda process=Path(f"/proc/{pid}"): not process.exists(), 10)  # type: ignore[misc]
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"


@WITHOUT_SSH
def test_f93_server_that_never_gets_ready_ends_the_run_with_its_last_lines(cli: Cli) -> None:
    job_file = write_job(cli, "wait.py", WAITER, keys="instances: 1")
    text = (cli.folder / job_file).read_text().replace("within: 1m", "within: 30s")
    cli.script(SERVER.replace("send_response(200)", "send_response(503)"), "serve.py")
    job, run = start(cli, cli.script(text, job_file))
    status = cli.wait_for_end(job)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 1)
    batch = (run.path / "logs/batch.log").read_text()
    assert "it was not ready within 30 s" in batch
    assert "generator 0 on port" in batch
    verdict = cli("diagnose", job).stdout
    assert "role-failure" in verdict
    assert "instance" in verdict
    assert "of role rollout on" in verdict
    assert "generator 0 on port" in verdict
    assert f"dtslurm logs {job} --role rollout" in " ".join(verdict.split())
    assert "could not be kept running" in cli("status", job).stdout
    assert not (run.path / "logs/0/rank-0.log").exists()


@WITHOUT_SSH
def test_f96_failures_that_a_restart_cannot_mend_end_the_run_at_once(cli: Cli) -> None:
    job_file = write_job(cli, "wait.py", WAITER)
    cli.script("import argparse\nargparse.ArgumentParser().parse_args()\n", "serve.py")
    job, run = start(cli, job_file)
    assert cli.wait_for_end(job)["statuses"][0]["exit_code"] == 2
    assert events_of(run, "role_failed")[0]["cause"] == "bad-arguments"
    assert len(events_of(run, "role_started")) == 2  # each instance once
    assert "unrecognized arguments" in cli("diagnose", job).stdout


def test_variables_of_the_trainer_have_addresses_and_a_role_gets_its_own_secrets_only(cli: Cli) -> None:
    names = ("JUDGE_KEY", "HUB_KEY")
    cli.script(f"import os\nprint(os.environ['JUDGES'], *map(os.environ.get, {names}))\n", "train.py")
    (cli.folder / "job.yaml").write_text(
        textwrap.dedent(f"""\
        time: 10
        secrets: [JUDGE_KEY, HUB_KEY]
        roles:
          trainer:
            script: train.py
            launcher: srun
            python: {sys.executable}
            env: {{JUDGES: "${{role.judge.urls}} of $DTSLURM_RUN_DIR"}}
          judge:
            command: [bash, -c, "env | grep ^[A-Z]*_KEY=; echo listening; sleep 600"]
            on: trainer
            secrets: [JUDGE_KEY]
            ready: {{line: listening}}
        """)
    )
    env = {**cli.env, "DTSLURM_TRUSTED_FOLDERS": "/", "JUDGE_KEY": "j-123", "HUB_KEY": "h-456"}
    job = Cli(cli.cluster, cli.folder, env, cli.started).submit("job.yaml")
    cli.wait_for_end(job)
    run = cli.run_dir(job)
    host = address(run, "judge-0")
    text = f"http://{host['host']}:{host['ports']['http']} of {run.path} j-123 h-456"
    assert (run.logs(0) / "rank-0.log").read_text().strip() == text
    output = (run.path / "roles/judge-0/logs/0/rank-0.log").read_text().splitlines()
    assert output == ["JUDGE_KEY=j-123", "listening"]


@WITHOUT_SSH
def test_role_that_uses_up_its_restarts_ends_the_run(cli: Cli) -> None:
    job_file = write_job(cli, "wait.py", WAITER, keys="instances: 1, restarts: 1")
    job, run = start(cli, job_file)
    for number in range(2):
        wait_for_events(cli, run, "role_ready", number + 1)
        os.kill(address(run, "rollout-0", number)["pid"], signal.SIGKILL)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"
    [failed] = events_of(run, "role_failed")
    assert (failed["role"], failed["instance"], failed["cause"]) == ("rollout", 0, "killed")
    assert failed["reason"] == "its restarts are used up (1)"


@WITHOUT_SSH
def test_f94_port_that_is_taken_is_replaced_by_a_free_one(cli: Cli) -> None:
    keys = "instances: 1, setup: ['while [ ! -e go ]; do sleep 0.1; done']"
    job, run = start(cli, write_job(cli, "wait.py", WAITER, keys=keys))
    wait_for_events(cli, run, "role_started", 1)
    cli.wait_until(lambda: next((run.path / "roles/rollout-0").rglob("step.json"), None) is not None)
    taken = first_port(job, 0)
    with ExitStack() as stack:
        cli.wait_until(lambda: _listen(taken, stack))  # a server of a test beside this one may have the port
        (cli.folder / "go").touch()
        wait_for_events(cli, run, "role_ready", 1)
    assert address(run, "rollout-0")["ports"]["http"] > taken


def _listen(port: int, stack: ExitStack) -> bool:
    """Return whether this process could begin to listen on a port."""
    try:
        stack.enter_context(socket.create_server(("", port)))
    except OSError:
        return False
    return True


@WITHOUT_SSH
def test_killed_supervisor_takes_over_the_instances(cli: Cli) -> None:
    job, run = start(cli, write_job(cli, "wait.py", WAITER))
    wait_for_events(cli, run, "role_ready", 2)
    cli.wait_until((run.path / "logs/0/rank-0.log").exists)
    supervisor = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{run.path}/supervisor\0--nodes=".encode() in _read(path)
    )
    os.kill(supervisor, signal.SIGKILL)
    wait_for_events(cli, run, "supervisor_killed", 1)
    pids = [address(run, f"rollout-{number}")["pid"] for number in range(2)]
    cli.wait_until(lambda: [item["state"] for item in instances_of(cli, job)] == ["ready", "ready"])
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    assert wait_for_events(cli, run, "role_ready", 3)[-1]["start"] == 1
    assert events_of(run, "role_ended")[0]["exit_code"] == 137


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@WITHOUT_SSH
def test_role_that_shares_a_process_group_restarts_with_the_trainer(cli: Cli) -> None:
    job_file = write_job(cli, "wait.py", WAITER, keys="instances: 2, restart: with trainer")
    job, run = start(cli, job_file)
    cli.wait_until((run.path / "logs/0/rank-0.log").exists)
    os.kill(address(run, "rollout-0")["pid"], signal.SIGKILL)
    cli.wait_until((run.path / "logs/1/rank-0.log").exists)
    assert events_of(run, "attempt_ended")[0]["cause"] == "role-restart"
    starts = [(event["instance"], event["start"]) for event in events_of(run, "role_started")]
    assert sorted(starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    cli("cancel", job)


@WITHOUT_SSH
def test_evaluator_evaluates_each_checkpoint_once_and_the_last_one_after_the_training(cli: Cli) -> None:
    cli.script(CHECKPOINTING, "train.py")
    cli.script("import os, sys\nprint('evaluated', os.environ['DTSLURM_STEP'], sys.argv[1])\n", "eval.py")
    job_file = cli.script(EVALUATED.format(python=sys.executable), "job.yaml")
    job, run = start(cli, job_file)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    results = [json.loads(line) for line in (run.path / "evaluations.jsonl").read_text().splitlines()]
    assert sorted(result["step"] for result in results) == [1, 2, 3, 4]
    assert {result["exit_code"] for result in results} == {0}
    log = cli("logs", "--role", "evaluator", job).stdout
    assert log.count("] evaluated ") == 4
    assert f"evaluated 4 {run.path}/checkpoints/step-4" in log


@WITHOUT_SSH
def test_each_task_of_an_array_has_its_own_servers(cli: Cli) -> None:
    cli.script("import sys\nprint('servers', *sys.argv[1:])\n", "quick.py")
    job_file = write_job(cli, "wait.py", WAITER)
    text = (cli.folder / job_file).read_text().replace("script: wait.py", "script: quick.py")
    job, run = start(cli, "-a", "0-1", cli.script(text, job_file))
    assert {item["state"] for item in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    urls = {line.split()[-1] for line in cli("logs", job).stdout.splitlines() if "] servers " in line}
    assert len(urls) == 2
    lines = cli("logs", "--role", "rollout", job).stdout.splitlines()
    begins = sorted(line.rpartition(" ")[0] for line in lines)
    assert begins == [
        f"[{task}/rollout/{number}] generator {number} on port" for task in (0, 1) for number in (0, 1)
    ]
    one = cli("logs", "--role", "rollout", f"{job}_1").stdout.splitlines()
    assert sorted(one) == sorted(line for line in lines if line.startswith("[1/"))
    assert [len(task.events()) > 0 for task in run.tasks().values()] == [True, True]


@ON_SLURM
def test_requeued_run_starts_its_roles_again(cli: Cli) -> None:
    job, run = start(cli, write_job(cli, "wait.py", WAITER), "--requeue")
    cli.wait_until((run.path / "logs/0/rank-0.log").exists)
    cli("requeue", job)
    cli.wait_until((run.path / "logs/1/rank-0.log").exists, 200)
    cli.wait_until(lambda: [item["state"] for item in instances_of(cli, job)] == ["ready", "ready"])
    cli("cancel", job)


@ON_SLURM
def test_instances_see_their_own_gpus_of_those_of_the_job(cli: Cli, slurm_lab: SlurmLab) -> None:
    cli.script(WAITER, "wait.py")
    # This job has the first GPUs of both nodes, so that those of the other job do not begin at 0. A job of
    # an earlier test that is still completing would have them.
    slurm_lab.wait_idle()
    other = cli.submit("-N", "2", "--gpus-per-node", "2", "-l", "srun", "wait.py")
    cli.wait_until(lambda: cli.state(other) == "RUNNING")
    cli.script("import os, time\nprint('gpus', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n", "gpus.py")
    job, run = start(cli, cli.script(WITH_GPUS.format(python=sys.executable), "job.yaml"))
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    [line] = [
        line for line in (run.path / "logs/0/rank-0.log").read_text().splitlines() if line.startswith("gpus ")
    ]
    gpus = line.split()[1].split(",")
    assert len(gpus) == 4
    assert "0" not in gpus
    shown = {line.split("] ")[1] for line in cli("logs", "--role", "judge,clock", job).stdout.splitlines()}
    assert shown == {f"GPUs {gpus[2]}.", f"GPUs {gpus[3]}.", "GPUs ."}
    cli("cancel", other)


def test_script_of_a_run_with_one_role_is_the_script_of_the_job(tmp_path: Path) -> None:
    with _project(tmp_path) as cli:
        cli.script("print()\n")
        one_role = cli.script(
            "time: 5\nroles:\n  trainer: {script: train.py, nodes: 2, launcher: srun}\n", "a.yaml"
        )
        plain = cli.script("time: 5\nscript: train.py\nnodes: 2\nlauncher: srun\n", "b.yaml")
        scripts = [cli("render", "--cluster", "local", name).stdout for name in (one_role, plain)]
        assert scripts[0] == scripts[1]


@contextmanager
def _project(tmp_path: Path) -> Iterator[Cli]:
    with command_line("local", tmp_path, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs")}) as cli:
        yield cli


@pytest.mark.slurm
def test_f95_instance_of_a_lost_node_moves_to_the_spare_node(
    tmp_path: Path, lab_root: Path, slurm_software: Software
) -> None:
    with SlurmLab(lab_root, nodes=3, gpus=0, software=slurm_software, extra_conf=["SlurmdTimeout=8"]) as lab:
        env = {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
        with command_line("slurm", tmp_path, env) as cli:
            job_file = write_job(cli, "wait.py", WAITER, keys="nodes: 1")
            _job, run = start(cli, job_file, "--spare-nodes", "1")
            wait_for_events(cli, run, "role_ready", 1)
            node = address(run, "rollout-0")["node"]
            lab.kill_node(node)
            second = wait_for_events(cli, run, "role_ready", 2, 240)[1]
            assert second["node"] not in {node, events_of(run, "attempt")[0]["nodes"][0]}
            assert events_of(run, "node_excluded")[0]["node"] == node
            assert len(events_of(run, "attempt")) == 1  # the trainer has not noticed


@pytest.mark.slurm
def test_instance_with_several_nodes_restarts_on_all_of_them_and_moves_from_a_lost_one(
    tmp_path: Path, lab_root: Path, slurm_software: Software
) -> None:
    pytest.importorskip("torch")
    with SlurmLab(lab_root, nodes=4, gpus=0, software=slurm_software, extra_conf=["SlurmdTimeout=8"]) as lab:
        env = {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
        with command_line("slurm", tmp_path, env) as cli:
            cli.script(SPANNING, "spanning.py")
            cli.script(WAITER, "wait.py")
            values = {"python": sys.executable, "environment": sys.prefix}
            job_file = cli.script(TWO_NODES_EACH.format(**values), "job.yaml")
            job, run = start(cli, job_file, "--spare-nodes", "1")
            joined = _await_joined(cli, run, 0)
            assert ",".join(joined) == instances_of(cli, job)[0]["node"]
            assert cli("logs", job, "--role", "rollout").stdout.count("joined ") == 2
            os.kill(list(joined.values())[1], signal.SIGKILL)
            assert list(_await_joined(cli, run, 1)) == list(joined)
            lost = list(joined)[1]
            lab.kill_node(lost)
            moved = _await_joined(cli, run, 2)
            assert set(moved) - set(joined) == set(lab.node_names) - set(joined) - {_main_node(run)}
            assert [event["node"] for event in events_of(run, "node_excluded")] == [lost]
            assert [event["cause"] for event in events_of(run, "role_ended")] == ["killed", "node-failure"]
            assert len(events_of(run, "attempt")) == 1


def _await_joined(cli: Cli, run: RunDir, number: int) -> dict[str, int]:
    """Return the processes by node of an instance's start, in the order of their ranks."""
    wait_for_events(cli, run, "role_ready", number + 1, 240)
    text = (run.path / f"roles/rollout-0/logs/{number}/rank-0.log").read_text()
    words = next(line for line in text.splitlines() if line.startswith("joined ")).split()[1:]
    return {name: int(pid) for name, _, pid in (word.partition("=") for word in words)}


def _main_node(run: RunDir) -> str:
    return str(events_of(run, "attempt")[0]["nodes"][0])
