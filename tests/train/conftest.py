"""Runs programs in several ranks, as often as tests like, without starting Python and torch each time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import busyness

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


class Zygote:
    """Forks ranks that have torch loaded already."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._answer()

    def start(self, order: dict[str, Any]) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        pids: list[int] = self._answer()["pids"]
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        try:
            codes: list[int] = self._answer()["codes"]
        except TimeoutError:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._answer()
            raise
        return codes

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE * busyness())[0]:
            raise TimeoutError("the ranks do not end")
        values: dict[str, Any] = json.loads(self._process.stdout.readline())
        return values


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    result = Zygote()
    yield result
    result.close()


@dataclass
class Job:
    """One run's folder, and its attempts."""

    zygote: Zygote
    folder: Path
    checkpoints: Path
    attempt: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def start(self, program: str, world: int, **args: Any) -> list[int]:
        """Start an attempt; several ranks meet as torchrun's would."""
        env = {
            "DTSLURM_RUN_DIR": str(self.folder),
            "DTSLURM_ATTEMPT": str(self.attempt),
            "DTSLURM_CHECKPOINT_DIR": str(self.checkpoints),
            "DTSLURM_METRICS": str(self.folder / "metrics" / str(self.attempt) / "train.jsonl"),
            **self.env,
        }
        self.attempt += 1
        if world > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
            env |= {"LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
        envs = [
            {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else env for rank in range(world)
        ]
        out = self.folder / f"out-{self.attempt - 1}"
        out.mkdir()
        return self.zygote.start({"program": program, "args": args, "envs": envs, "out": str(out)})

    def wait(self, pids: list[int]) -> list[int]:
        return self.zygote.wait(pids)

    def run(self, program: str, world: int, **args: Any) -> list[int]:
        return self.wait(self.start(program, world, **args))

    def done(self, program: str, world: int, **args: Any) -> None:
        """Run an attempt that must end well."""
        codes = self.run(program, world, **args)
        assert codes == [0] * world, self.text()

    def text(self, attempt: int = -1) -> str:
        """What the ranks of an attempt printed."""
        out = self.folder / f"out-{self.attempt - 1 if attempt < 0 else attempt}"
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(out.glob("rank-*.log")))

    def events(self, name: str = "") -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        every = [json.loads(line) for line in lines]
        return [item for item in every if not name or item["event"] == name]

    def metrics(self, attempt: int) -> list[dict[str, Any]]:
        path = self.folder / "metrics" / str(attempt) / "train.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir())

    def final(self) -> dict[str, Any]:
        import torch

        weights: dict[str, Any] = torch.load(self.folder / f"out-{self.attempt - 1}" / "final.pt")
        return weights

    def samples(self, attempt: int | None = None) -> dict[int, dict[int, list[int]]]:
        """Samples by epoch and step, of all ranks; of the last attempt that made a step."""
        result: dict[int, dict[int, tuple[int, list[int]]]] = {}
        for path in sorted(self.folder.glob("out-*/seen-*.jsonl")):
            for line in path.read_text().splitlines():
                document = json.loads(line)
                if attempt is not None and document["attempt"] != attempt:
                    continue
                steps = result.setdefault(document["epoch"], {})
                before = steps.get(document["step"], (-1, []))
                mine = before[1] if before[0] == document["attempt"] else []
                if document["attempt"] >= before[0]:
                    steps[document["step"]] = (document["attempt"], [*mine, *document["samples"]])
        return {epoch: {step: item[1] for step, item in steps.items()} for epoch, steps in result.items()}

    def wait_until(self, happened: Any) -> None:
        begin = time.monotonic()
        while not happened():
            assert time.monotonic() - begin < PATIENCE * busyness(), self.text()
            time.sleep(0.02)


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Job:
    folder = tmp_path / "run"
    folder.mkdir()
    return Job(zygote, folder, folder / "checkpoints")


@pytest.fixture(scope="session")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of two ranks that nothing happened to."""
    return run_undisturbed(zygote, tmp_path_factory.mktemp("undisturbed"), "dropout")


def run_undisturbed(zygote: Zygote, folder: Path, program: str) -> Job:
    """Run a program in two ranks to its end."""
    job = Job(zygote, folder, folder / "checkpoints")
    job.done(program, 2)
    return job


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all tensors agree in every bit."""
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(one[key].contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8))
        for key in one
    )


def flat(steps: dict[int, list[int]]) -> list[int]:
    """Return the samples of all steps, sorted."""
    return sorted(chain.from_iterable(steps.values()))
