"""The example and the code blocks of the pages, run as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "survive"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "train.md").read_text(), re.MULTILINE | re.DOTALL
)
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in OF_A_LAUNCHER}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "DTSLURM_RUN_DIR": str(folder),
        "DTSLURM_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "DTSLURM_METRICS": str(folder / "train.jsonl"),
    }


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    out = process.communicate(timeout=600)[0]
    assert process.returncode == code, out
    return out


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block_of_the_page_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCKS[number])
    strict = () if "PYTHONWARNINGS" in os.environ else ("-W", "error")  # see versions.py
    out = finished(start(tmp_path, *strict, "block.py"))
    assert "Traceback" not in out


def test_example_has_at_most_30_lines_of_code() -> None:
    code = [
        line
        for line in (EXAMPLE / "train.py").read_text().partition('"""\n\n')[2].splitlines()
        if line.strip()
    ]
    assert len(code) <= 30
