"""A cluster for staging in one process: each node is a turn of it, with a disk of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.staging import main as staging_main
from dtslurm.worker.staging import node


class Cluster:
    """Nodes of which each is a turn of this process, with a disk of its own; srun asks them one by one.

    Attributes:
        before: what happens before a node is asked, by verb and number.
        silent: those that die before they answer.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.run = folder / "run"
        self.run.mkdir()
        self.data = folder / "data"
        (self.data / "deep").mkdir(parents=True)
        for number in range(4):
            (self.data / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        (self.data / "deep/x.txt").write_text("x")
        self.count = 2
        for number in range(4):
            self.disk(number).mkdir()
        self.before: dict[tuple[str, int], Callable[[], object]] = {}
        self.silent: set[tuple[str, int]] = set()
        self.machines: Callable[[int], str] = "m{}".format
        monkeypatch.setenv("DTSLURM_RUN_DIR", str(self.run))
        monkeypatch.setenv("DTSLURM_ATTEMPT", "0")
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
        own = SimpleNamespace(run=self.srun, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
        monkeypatch.setattr(staging_main, "subprocess", own)
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.passes)
        monkeypatch.setattr(staging_main, "time", clock)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def disk(self, number: int) -> Path:
        return self.folder / f"disk{number}"

    def srun(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if argv[0] != "srun":
            assert options.pop("check") is False
            return subprocess.run(argv, check=False, **options)
        verb, folder = argv[-2:]
        for number in range(self.count):
            with self.monkeypatch.context() as there:
                there.setenv("SLURM_NODEID", str(number))
                there.setenv("SLURMD_NODENAME", f"n{number + 1}")
                there.setenv("DISK", str(self.disk(number)))
                there.setattr(node, "_machine", lambda number=number: self.machines(number))
                self.before.get((verb, number), lambda: None)()
                if (verb, number) not in self.silent:
                    there.setattr(sys, "argv", ["staging", "node", verb, folder])
                    with pytest.raises(SystemExit, match="0"):
                        staging_main.main()
        return subprocess.CompletedProcess(argv, 1 if self.silent else 0)

    def ask(self, *words: str) -> int:
        """Run as the batch script does; return the exit code."""
        self.monkeypatch.setattr(
            sys, "argv", ["staging", *words, "--", "srun", f"--nodes={self.count}", "python3"]
        )
        try:
            staging_main.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    def stage(self, *items: str) -> int:
        return self.ask("in", *(f"--stage={item}" for item in items))

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.run / "events.jsonl").read_text().splitlines()
        return [item for item in map(json.loads, lines) if item["event"] == name]
