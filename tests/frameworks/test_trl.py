"""TRL: its asynchronous trainer with servers as a role, and the example that needs a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import events_of
from tests.e2e.test_roles import address
from tests.frameworks.conftest import Activated
from tests.frameworks.envs import environment

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1500), pytest.mark.sampled(1, "of TRL")]

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts_roles")
EXAMPLE = ROOT / "examples" / "roles" / "grpo.py"
JOB = f"""
job_name: grpo
time: 10
env: {{PYTHONPATH: {ROOT}}}
roles:
  trainer: {{script: train_async.py, args: [policy], launcher: torchrun, ntasks_per_node: 2}}
  policy:
    command: [python, policy_server.py, "${{port.http}}", policy]
    on: trainer
    instances: 2
    ready: {{http: /, silence: 20s}}
"""
# Prints the parameters that the example passes to classes of TRL, and which do not exist there.
CHECK = """
import ast, inspect, runpy, sys
program = runpy.run_path(sys.argv[1])  # imports what the example imports
for node in ast.walk(ast.parse(open(sys.argv[1]).read())):
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"GRPOConfig", "GRPOTrainer"}:
        known = inspect.signature(program[node.func.id]).parameters
        names = [keyword.arg for keyword in node.keywords]
        print(node.func.id, len(names), [name for name in names if name not in known])
config = program["GRPOConfig"](output_dir="x", bf16=False, use_vllm=True, vllm_mode="server")
print(config.vllm_mode)
"""


def test_trl_knows_every_parameter_that_the_example_passes() -> None:
    python = environment("trl", ["trl==1.16.0", "torch==2.13.0"])
    done = subprocess.run(
        [str(python), "-c", CHECK, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout.split("\n") == ["GRPOConfig 7 []", "GRPOTrainer 4 []", "server", ""], done.stderr


@pytest.mark.slurm
def test_asynchronous_trainer_continues_when_a_server_of_its_policy_is_killed(activated: Activated) -> None:
    # The last release whose trainer needs no kernel that only GPUs have.
    packages = ["trl==1.6.0", "torch==2.13.0", "transformers<5.13", "aiohttp", "requests"]
    python = environment("trl-async", packages)
    cli = activated(python)
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, cli.folder)
    subprocess.run([str(python), "policy.py", "policy"], cwd=cli.folder, check=True, capture_output=True)
    (cli.folder / "job.yaml").write_text(JOB)
    job = cli.submit("job.yaml")
    run = cli.run_dir(job)
    server = run.path / "roles/policy-0/logs/0/rank-0.log"
    ended = run.path / "done"
    cli.wait_until(
        lambda: ended.exists() or (server.exists() and "weights of version 3" in server.read_text()), 300
    )
    assert not ended.exists(), (run.logs(0) / "rank-0.log").read_text()
    os.kill(address(run, "policy-0")["pid"], signal.SIGKILL)
    status = cli.wait_for_end(job, limit=400)["statuses"][0]
    text = (run.logs(0) / "rank-0.log").read_text()
    assert status["state"] == "COMPLETED", text[-3000:]
    assert "weights sent again to policy-0" in text
    assert [event["cause"] for event in events_of(run, "role_ended")] == ["killed"]
    rewards = json.loads(text.split("rewards ")[-1])
    assert len(rewards) >= 30
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5]) + 0.5, rewards  # it learns the token that is rewarded
