"""The example of TRL is written for the TRL of today. Its training needs a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.frameworks.envs import environment

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1500)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "roles" / "grpo.py"
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
