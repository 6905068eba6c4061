"""One object around a training loop: it meets the other ranks, saves, goes on, and leaves when told to."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# Imported only to be early. It holds on to the process group that it finds when loaded, and
# DistributedDataParallel loads it: the group's threads would outlive destroy_process_group, and some day
# crash Python on its way out.
import torch.distributed.nn

from dtslurm.errors import RequestInvalid
from dtslurm.train.agreement import COMPARE, SAVE, STALE, STOP, Agreement
from dtslurm.train.checkpoint import Checkpointer
from dtslurm.train.metrics import Metrics, without_graph
from dtslurm.train.place import RankInfo, find_place
from dtslurm.train.run_files import RunFiles, StaleAttempt
from dtslurm.train.state import check, seed_dice
from dtslurm.train.straggler import OwnTime, Slowest, Straggler

GO_ON = 85  # exit code: saved, and wants to go on
LEASE_S, COMPARE_S = 10.0, 30.0  # how often rank 0 looks at the lease, and has ranks' times compared


class Leave(SystemExit):
    """All ranks leave together, having saved; the process ends with exit code 85."""


def session(  # noqa: PLR0913 (each by its name)
    *,
    save_every: int | None = None,
    save_minutes: float | None = 10.0,
    keep: int | None = 3,
    folder: str | os.PathLike[str] | None = None,
    total_steps: int | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    signals: Sequence[str] = ("USR2", "TERM"),
    agree_every: int | None = None,
    log_seconds: float = 1.0,
) -> Session:
    """Return a session, to be used in a ``with`` statement around training.

    It works in one process as in many, whatever started them: torchrun, srun, mpirun, accelerate, deepspeed,
    Lightning, or nothing. A process group that exists already is used and left alone.

    Args:
        save_every: save at each multiple of so many steps.
        save_minutes: save when so many minutes have passed since the last time; None: by steps alone.
        keep: how many checkpoints are kept, None for all.
        folder: where, by default ``$DTSLURM_CHECKPOINT_DIR``.
        total_steps: for whoever reads the metrics.
        seed: start random numbers from it, alike on all ranks until `Session.restore`, after which each has
            its own.
        device: by default this process's GPU, or the CPU where there is none.
        backend: of the process group, by default NCCL for GPUs and gloo for the CPU.
        timeout: seconds that a collective of training may take, by default torch's.
        signals: those that mean "save and leave", without ``SIG``.
        agree_every: steps between two questions whether a rank was told to leave, by default as many
            as take about half a second.
        log_seconds: least time between two lines of metrics from `Session.end_step`.
    """
    return Session(**locals())


class Session:
    """A training run as one of its processes sees it; made by `session`.

    Attributes:
        rank, local_rank, node_rank, world_size, local_world_size: this process's place.
        device: where its model belongs.
        step: how many steps are done, those of earlier attempts included.
        checkpoints: what saves and restores.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.place = RankInfo()
        self.device = torch.device("cpu")
        self.step = 0
        self.run = RunFiles()
        self._state: dict[str, Any] = {}
        self._own_group = False
        self._heard: list[int] = []
        self._handlers: dict[int, Any] = {}

    # ---- begin and end

    def __enter__(self) -> Session:  # noqa: PYI034 (Self is not in typing before Python 3.11)
        options = self._options
        self._listen(options["signals"])
        self.run = RunFiles.of()
        self.place = find_place()
        self.device = _device(options["device"], self.place)
        self._join(options["backend"], options["timeout"])
        control = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self.checkpoints = Checkpointer(options["folder"], keep=options["keep"], run=self.run)
        self.checkpoints.claim()
        self._control = control
        self._agreement = Agreement(control, options["agree_every"])
        self._straggler, self._own_time = Straggler(control), OwnTime(self.device)
        self._metrics = Metrics(self.run.metrics if self.rank == 0 else None, self.rank)
        if options["seed"] is not None:
            seed_dice(options["seed"])
        now = time.perf_counter()
        self._saved_step, self._saved_at = 0, now
        self._count, self._asked = 0, (0, now)
        self._lease_at = self._compared_at = now
        self._logged = (0, -float("inf"))  # step and time of the last line; the first step has one
        self._metrics_left: dict[str, Any] | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        together = kind is None or kind is Leave
        try:
            if kind is None:
                if self._state and self.step != self._saved_step:
                    self.checkpoints.save(self.step, self._state, wait=True)
                self.checkpoints.wait(failing=True)
            elif kind is not Leave and not isinstance(error, StaleAttempt):
                self.checkpoints.give_up(30.0)
            if together:
                self._agreement.close()
                self._straggler.end()
            if self.rank == 0 and self._metrics_left is not None:
                self._write_metrics(time.perf_counter(), self._metrics_left, None)
            self._metrics.close()
        finally:
            if together:
                self._part()
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if kind is Leave else handler)

    def _part(self) -> None:
        """Leave the process group, together: a rank whose peers are gone would end by an error."""
        if self._own_group:
            if self._control is not None:
                dist.barrier(self._control)
            dist.destroy_process_group()

    def _listen(self, names: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread listen
        for name in names:
            number = getattr(signal, f"SIG{name}", None)
            if number is None:
                raise RequestInvalid([f"{name} is no signal"], hint="signals=('USR2', 'TERM') is the default")
            self._handlers[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        del frame
        self._heard.append(number)  # no more than this: a step may be in the middle of anything

    def _join(self, backend: str | None, timeout: float | None) -> None:
        if dist.is_initialized():
            place = vars(self.place)
            self.place = RankInfo(**{**place, "rank": dist.get_rank(), "world_size": dist.get_world_size()})
            return
        words: dict[str, Any] = {"timeout": timedelta(seconds=timeout)} if timeout else {}
        if self.place.world_size == 1:
            words.update(store=dist.HashStore(), rank=0, world_size=1)
        else:
            host, port = self.place.master or ("", 0)
            meeting = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.place.local_rank}
            for name, value in {**meeting, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
                os.environ.setdefault(name, str(value))  # for torch, and for libraries that look there
        gpu = self.device.type == "cuda"
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if gpu else "gloo"), **words)
        self._own_group = True

    # ---- who we are

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``world_size - 1``."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """How many processes train."""
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.place.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this process's node."""
        return self.place.node_rank

    @property
    def local_world_size(self) -> int:
        """How many processes train on this node."""
        return self.place.local_world_size

    def print(self, *words: object) -> None:
        """Print on rank 0 alone, at once."""
        if self.rank == 0:
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()

    # ---- training

    def restore(self, **state: Any) -> int:
        """Go on from the latest good checkpoint, if there is one; say what belongs to a checkpoint.

        Call it when model, optimizer and all else are as they are to be trained (wrapped, sharded, on their
        device), once, on all ranks: ``run.restore(model=model, optimizer=optimizer, loader=loader)``.

        Returns:
            The steps that are done; 0 at the beginning.

        Raises:
            CheckpointFailed: the checkpoint is not of these objects.
            RequestInvalid: an object cannot be saved.
        """
        check(state)  # also where there is no checkpoint yet: the first save would be too late
        self._state = state
        found = self.checkpoints.restore(state)
        self.step = self._saved_step = found.step if found else 0
        seed = self._options["seed"]
        if seed is not None and (found is None or found.world_size != self.world_size):
            seed_dice(seed + 1_000_003 * self.step + self.rank + 1)
        if found:
            self.print(f"goes on after step {found.step} from {found.path}")
        now = time.perf_counter()
        self._saved_at, self._asked = now, (self._count, now)
        self._own_time.step_ended()
        return self.step

    def watch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Time this model's forward passes, so that a rank slower than the others is named; return it."""
        self._own_time.watch(model)
        return model

    def end_step(self, **metrics: Any) -> bool:
        """Count a step that is done; all ranks call it after each optimizer step.

        It writes metrics, saves when it is time to, and when any rank was told to leave, saves on all and
        ends them with exit code 85, all at the same step.

        Args:
            metrics: numbers, or tensors of one element, for the line of metrics (``loss=loss``).

        Returns:
            True when all ranks are to leave but nothing was given to `restore`, so that saving and leaving
            are the caller's to do.

        Raises:
            Leave: all ranks leave.
            StaleAttempt: a later attempt of this run has begun.
            CheckpointFailed: see `Checkpointer.save`.
        """
        self.step += 1
        self._count += 1
        self._own_time.step_ended()
        now = time.perf_counter()
        slowest, wishes, step_time = None, 0, 0.0
        if self._agreement.due(self._count):
            slowest = self._straggler.end()
            wishes, step_time = self._wishes(now)
        verdict = self._agreement.at(self._count, wishes, step_time)
        self._metrics_left = metrics
        self.checkpoints.metrics = without_graph(metrics)
        if self.rank == 0 and (slowest or now - self._logged[1] >= self._options["log_seconds"]):
            self._write_metrics(now, metrics, slowest)
        if verdict.stale:
            self._stale()
        if verdict.stop:
            return self._leave()
        if verdict.compare:
            self._straggler.begin(self._own_time.take())
        every = self._options["save_every"]
        if self._state and (verdict.save or (every and self.step % every == 0)):
            self.checkpoint()
        return False

    def log(self, **values: Any) -> None:
        """Write a line of metrics now, from rank 0; ``step`` is added."""
        self._metrics.write({"step": self.step, **values})

    def checkpoint(self, *, wait: bool = False) -> None:
        """Save now what was given to `restore`; all ranks call it at the same step.

        It returns when a copy is in memory, or with ``wait`` when the checkpoint is complete.

        Raises:
            RequestInvalid: nothing was given to `restore`.
            CheckpointFailed: see `Checkpointer.save`.
            StaleAttempt: a later attempt of this run has begun.
        """
        if not self._state:
            raise RequestInvalid(["nothing to save"], hint="call restore(model=model, ...) before training")
        self.checkpoints.save(self.step, self._state, wait=wait)
        self._saved_step, self._saved_at = self.step, time.perf_counter()

    def _wishes(self, now: float) -> tuple[int, float]:
        """Return what this rank asks of all, and how long a step takes."""
        steps, since = self._count - self._asked[0], now - self._asked[1]
        self._asked = (self._count, now)
        wishes = STOP if self._heard else 0
        if self.checkpoints.stale:
            wishes |= STALE
        if self.rank == 0:
            minutes = self._options["save_minutes"]
            if minutes is not None and now - self._saved_at >= 60 * minutes:
                wishes |= SAVE
            if now - self._compared_at >= COMPARE_S:
                wishes |= COMPARE
                self._compared_at = now
            if now - self._lease_at >= LEASE_S:
                self._lease_at = now
                with contextlib.suppress(OSError):  # the next look may work; each save makes its own
                    holder = self.run.leased_to()
                    wishes |= STALE if holder is not None and holder > self.run.attempt else 0
        return wishes, since / steps if steps else 0.0

    def _write_metrics(self, now: float, metrics: dict[str, Any], slowest: Slowest | None) -> None:
        step, at = self._logged
        self._logged, self._metrics_left = (self.step, now), None
        values: dict[str, Any] = {"step": self.step}
        if self._options["total_steps"] is not None:
            values["total_steps"] = self._options["total_steps"]
        if self.step > step and math.isfinite(at):
            values["step_time_s"] = round((now - at) / (self.step - step), 6)
        if self.device.type == "cuda":
            values["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if slowest is not None:
            values |= {
                "slowest_rank": slowest.rank,
                "slowest_own_s": round(slowest.seconds, 6),
                "median_own_s": round(slowest.median, 6),
            }
            self.print(
                f"rank {slowest.rank} is slow: {slowest.seconds:.3g} s a step on its own account, "
                f"{slowest.median:.3g} s in the median"
            )
        self._metrics.write({**values, **metrics})

    def _stale(self) -> None:
        known = self.checkpoints.stale  # and said
        message = f"attempt {self.run.attempt} ends: the run belongs to attempt {self.run.leased_to()} now"
        if self.rank == 0 and not known:
            sys.stderr.write(message + "\n")
        raise StaleAttempt(message)

    def _leave(self) -> bool:
        if not self._state:
            return True
        for number in self._handlers:
            signal.signal(
                number, signal.SIG_IGN
            )  # a launcher ends ranks that leave a little later than the first
        self.checkpoint(wait=True)
        self.print(f"told to stop: saved after step {self.step}, leaves with exit code {GO_ON}")
        raise Leave(GO_ON)


def _device(wanted: str | torch.device | None, place: RankInfo) -> torch.device:
    """Return this process's device, made the current one if it is a GPU."""
    if wanted is not None:
        device = torch.device(wanted)
    elif torch.cuda.is_available():
        # Some sites show a process all GPUs of its node, others its own alone: the modulo serves both.
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
