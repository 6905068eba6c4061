"""Tries an installed dtslurm outside its checkout: ``python -m tests.release.trial PROGRAM FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import dtslurm
from tests.release.build import quietly

RENDER = ("render", "--cluster", "perlmutter", "-N2", "-A", "proj", "-t", "60", "train.py")
PLAN = ("plan", "llama-3-8b", "--gpu", "H100-80GB", "-N", "2", "--gpus-per-node", "8", "--json")

# Where each shell looks for completions below an installation's share folder.
COMPLETIONS = {
    "bash": "bash-completion/completions/dtslurm",
    "zsh": "zsh/site-functions/_dtslurm",
    "fish": "fish/vendor_completions.d/dtslurm.fish",
}


def try_out(program: Path, folder: Path) -> None:
    """Use a program as its user would, in an empty folder and with nothing of this process's environment.

    Raises:
        RuntimeError: a command failed.
        AssertionError: a command did not say what it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text("import os\nprint('rank', os.environ['RANK'], 'trains')\n")
    env = {"PATH": f"{program.parent}:{os.defpath}", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    env |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    env |= {"DTSLURM_RUN_ROOT": str(folder / "runs"), "DTSLURM_LOCAL_STATE": str(folder / "local")}

    def say(*words: str) -> str:
        return quietly([program, *words], cwd=folder, env=env)

    assert say("--version") == f"dtslurm {dtslurm.__version__}\n"  # an installed one knows of no commit
    assert say(*RENDER).startswith("#!/bin/bash")
    assert "perlmutter" in say("cluster", "list")
    assert json.loads(say(*PLAN))["schema"] == 1
    share = program.resolve().parents[1] / "share"
    assert (share / "man/man1/dtslurm.1").read_text() == say("manual")
    for shell, file in COMPLETIONS.items():
        assert (share / file).read_text() == say("completion", shell)
    words = ("submit", "--cluster", "local", "--parsable", "-l", "srun", "--ntasks-per-node", "2", "-t", "5")
    job = say(*words, "--python", sys.executable, "--wait", "train.py").split()[0]
    printed = say("logs", job)
    assert all(f"rank {rank} trains" in printed for rank in (0, 1)), printed


if __name__ == "__main__":
    try_out(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
