"""The session: joins the ranks, saves and restores checkpoints, and stops training on a signal."""

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

# This import must come before the process group exists. The module keeps a reference to the process group
# that exists when the module is loaded, and DistributedDataParallel loads the module. The group's threads
# would then outlive destroy_process_group and could crash Python at exit.
import torch.distributed.nn

from dtslurm.errors import RequestInvalid
from dtslurm.train.agreement import COMPARE, SAVE, STALE, STOP, Agreement
from dtslurm.train.checkpoint import Checkpointer
from dtslurm.train.metrics import Metrics, without_graph
from dtslurm.train.place import RankInfo, find_place
from dtslurm.train.profiling import StepProfiler
from dtslurm.train.run_files import RunFiles, StaleAttempt
from dtslurm.train.state import check_objects, seed_generators
from dtslurm.train.straggler import ForwardTimer, Slowest, Straggler

GO_ON = 85  # exit code: the run saved a checkpoint and requests to continue in a new attempt
# Seconds between rank 0's checks of the lease, and between comparisons of the ranks' step times.
LEASE_S, COMPARE_S = 10.0, 30.0


class Leave(SystemExit):
    """Ends the process with exit code 85 after all ranks have saved at the same step."""


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
    """Return a session for a ``with`` statement around training.

    A session works in a single process and in many, started by torchrun, srun, mpirun, accelerate, deepspeed,
    Lightning or no launcher. A session uses an existing process group and does not destroy it.

    Args:
        save_every: save at each multiple of this number of steps.
        save_minutes: save when this many minutes have passed since the last save; None saves by steps alone.
        keep: number of checkpoints to keep, None for all.
        folder: checkpoint directory, by default ``$DTSLURM_CHECKPOINT_DIR``.
        total_steps: planned number of steps, written to the metrics for programs that read them.
        seed: seed of the random number generators, the same on all ranks until `Session.restore`; afterwards
            each rank has its own seed.
        device: device of the model, by default this process's GPU, or the CPU if there is no GPU.
        backend: backend of the process group, by default NCCL for GPUs and gloo for the CPU.
        timeout: seconds that a collective of training may take, by default torch's timeout.
        signals: names, without ``SIG``, of the signals that mean "save and exit".
        agree_every: steps between two agreements of the ranks on whether to stop, by default the number of
            steps that takes about half a second.
        log_seconds: minimum seconds between two lines of metrics from `Session.end_step`.
    """
    return Session(**locals())


class Session:
    """A training run as seen by one of its processes; created by `session`.

    Attributes:
        rank, local_rank, node_rank, world_size, local_world_size: ranks and sizes of this process.
        device: the device of the process's model.
        step: number of finished steps, including those of earlier attempts.
        checkpoints: the `Checkpointer` that saves and restores.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.place = RankInfo()
        self.device = torch.device("cpu")
        self.step = 0
        self.run = RunFiles()
        self._state: dict[str, Any] = {}
        self._owns_group = False
        self._received_signals: list[int] = []
        self._handlers: dict[int, Any] = {}

    # ---- Enter and exit

    def __enter__(self) -> Session:  # noqa: PYI034 (Self is not in typing before Python 3.11)
        options = self._options
        self._install_handlers(options["signals"])
        self.run = RunFiles.of()
        self.place = find_place()
        self.device = _device(options["device"], self.place)
        self._init_process_group(options["backend"], options["timeout"])
        control_group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self.checkpoints = Checkpointer(options["folder"], keep=options["keep"], run=self.run)
        self.checkpoints.claim()
        self._control_group = control_group
        self._agreement = Agreement(control_group, options["agree_every"])
        self._straggler, self._forward_timer = Straggler(control_group), ForwardTimer(self.device)
        self._metrics = Metrics(self.run.metrics if self.rank == 0 else None, self.rank)
        self._profiler = StepProfiler(self.run, self.rank)
        if options["seed"] is not None:
            seed_generators(options["seed"])
        now = time.perf_counter()
        self._saved_step, self._saved_at = 0, now
        self._local_step, self._last_agreement = 0, (0, now)
        self._lease_at = self._compared_at = now
        self._last_logged = (0, -float("inf"))  # step and time of the last line; the first step writes a line
        self._unwritten_metrics: dict[str, Any] | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_orderly_exit = kind is None or kind is Leave
        try:
            if kind is None:
                if self._state and self.step != self._saved_step:
                    self.checkpoints.save(self.step, self._state, wait=True)
                self.checkpoints.wait(failing=True)
            elif kind is not Leave and not isinstance(error, StaleAttempt):
                self.checkpoints.give_up(30.0)
            if is_orderly_exit:
                self._agreement.close()
                self._straggler.end()
            if self.rank == 0 and self._unwritten_metrics is not None:
                self._write_metrics(time.perf_counter(), self._unwritten_metrics, None)
            self._metrics.close()
            self._profiler.close()
        finally:
            if is_orderly_exit:
                self._leave_process_group()
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if kind is Leave else handler)

    def _leave_process_group(self) -> None:
        """Destroy the process group on all ranks together, because a rank whose peers are gone would fail."""
        if self._owns_group:
            if self._control_group is not None:
                dist.barrier(self._control_group)
            dist.destroy_process_group()

    def _install_handlers(self, names: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only
        for name in names:
            number = getattr(signal, f"SIG{name}", None)
            if number is None:
                raise RequestInvalid(
                    [f"{name} is not the name of a signal"], hint="use signals=('USR2', 'TERM'), the default"
                )
            self._handlers[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        del frame
        # The handler only records the signal, because it can interrupt a step at any point.
        self._received_signals.append(number)

    def _init_process_group(self, backend: str | None, timeout: float | None) -> None:
        if dist.is_initialized():
            place = vars(self.place)
            self.place = RankInfo(**{**place, "rank": dist.get_rank(), "world_size": dist.get_world_size()})
            return
        group_options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)} if timeout else {}
        if self.place.world_size == 1:
            group_options.update(store=dist.HashStore(), rank=0, world_size=1)
        else:
            host, port = self.place.master or ("", 0)
            rank_variables = {
                "RANK": self.rank,
                "WORLD_SIZE": self.world_size,
                "LOCAL_RANK": self.place.local_rank,
            }
            for name, value in {**rank_variables, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
                # for torch, and for libraries that read these variables
                os.environ.setdefault(name, str(value))
        gpu = self.device.type == "cuda"
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if gpu else "gloo"), **group_options)
        self._owns_group = True

    # ---- Rank and sizes

    @property
    def rank(self) -> int:
        """Global rank of this process, 0 to ``world_size - 1``."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes of its node."""
        return self.place.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this process's node."""
        return self.place.node_rank

    @property
    def local_world_size(self) -> int:
        """Number of training processes on this node."""
        return self.place.local_world_size

    def print(self, *words: object) -> None:
        """Print on rank 0 only, and flush."""
        if self.rank == 0:
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()

    # ---- Training

    def restore(self, **state: Any) -> int:
        """Register the objects to save, and restore them from the latest valid checkpoint if there is one.

        Call this method once, on all ranks, when the objects are ready for training (wrapped, sharded, on
        their device): ``run.restore(model=model, optimizer=optimizer, loader=loader)``.

        Returns:
            The number of finished steps; 0 without a checkpoint.

        Raises:
            CheckpointFailed: the checkpoint does not match these objects.
            RequestInvalid: an object cannot be saved.
        """
        check_objects(state)  # Check even without a checkpoint, so that errors appear before the first save.
        self._state = state
        checkpoint = self.checkpoints.restore(state)
        self.step = self._saved_step = checkpoint.step if checkpoint else 0
        seed = self._options["seed"]
        if seed is not None and (checkpoint is None or checkpoint.world_size != self.world_size):
            seed_generators(seed + 1_000_003 * self.step + self.rank + 1)
        if checkpoint:
            self.print(f"continues after step {checkpoint.step} from {checkpoint.path}")
        now = time.perf_counter()
        self._saved_at, self._last_agreement = now, (self._local_step, now)
        self._forward_timer.step_ended()
        return self.step

    def watch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Time the model's forward passes so that a slow rank can be reported; return the model."""
        self._forward_timer.watch(model)
        return model

    def end_step(self, **metrics: Any) -> bool:
        """Count a finished step; all ranks call this method after each optimizer step.

        The method writes metrics and saves when a checkpoint is due. If any rank received a stop signal, all
        ranks save and exit with exit code 85 at the same step.

        Args:
            metrics: numbers, or tensors of one element, for the line of metrics (``loss=loss``).

        Returns:
            True if all ranks must stop but `restore` received no objects; the caller must then save and exit.

        Raises:
            Leave: all ranks exit.
            StaleAttempt: a later attempt of this run has begun.
            CheckpointFailed: see `Checkpointer.save`.
        """
        self.step += 1
        self._local_step += 1
        self._forward_timer.step_ended()
        self._profiler.end_step()
        now = time.perf_counter()
        slowest_rank, requested_actions, step_time = None, 0, 0.0
        if self._agreement.is_due(self._local_step):
            slowest_rank = self._straggler.end()
            requested_actions, step_time = self._requested_actions(now)
        agreed_action = self._agreement.at(self._local_step, requested_actions, step_time)
        self._unwritten_metrics = metrics
        self.checkpoints.metrics = without_graph(metrics)
        if self.rank == 0 and (slowest_rank or now - self._last_logged[1] >= self._options["log_seconds"]):
            self._write_metrics(now, metrics, slowest_rank)
        if agreed_action.stale:
            self._exit_stale()
        if agreed_action.stop:
            return self._save_and_exit()
        if agreed_action.compare:
            self._straggler.begin(self._forward_timer.take())
        save_interval = self._options["save_every"]
        if self._state and (agreed_action.save or (save_interval and self.step % save_interval == 0)):
            self.checkpoint()
        return False

    def log(self, **values: Any) -> None:
        """Write a line of metrics with the current ``step`` now, on rank 0."""
        self._metrics.write({"step": self.step, **values})

    def checkpoint(self, *, wait: bool = False) -> None:
        """Save the objects given to `restore` now; all ranks call this method at the same step.

        The method returns when a copy is in CPU memory, or with ``wait`` when the checkpoint is complete.

        Raises:
            RequestInvalid: `restore` received no objects.
            CheckpointFailed: see `Checkpointer.save`.
            StaleAttempt: a later attempt of this run has begun.
        """
        if not self._state:
            raise RequestInvalid(
                ["nothing to save"], hint="call restore(model=model, ...) before the training"
            )
        self.checkpoints.save(self.step, self._state, wait=wait)
        self._saved_step, self._saved_at = self.step, time.perf_counter()

    def _requested_actions(self, now: float) -> tuple[int, float]:
        """Return the actions this rank requests of all ranks, and the seconds per step."""
        steps, elapsed = self._local_step - self._last_agreement[0], now - self._last_agreement[1]
        self._last_agreement = (self._local_step, now)
        requested_actions = STOP if self._received_signals else 0
        if self.checkpoints.stale:
            requested_actions |= STALE
        if self.rank == 0:
            minutes = self._options["save_minutes"]
            if minutes is not None and now - self._saved_at >= 60 * minutes:
                requested_actions |= SAVE
            if now - self._compared_at >= COMPARE_S:
                requested_actions |= COMPARE
                self._compared_at = now
            if now - self._lease_at >= LEASE_S:
                self._lease_at = now
                # A failed check is ignored: the next one may succeed, and each save checks the lease itself.
                with contextlib.suppress(OSError):
                    holder = self.run.leased_to()
                    requested_actions |= STALE if holder is not None and holder > self.run.attempt else 0
        return requested_actions, elapsed / steps if steps else 0.0

    def _write_metrics(self, now: float, metrics: dict[str, Any], slowest_rank: Slowest | None) -> None:
        last_step, last_time = self._last_logged
        self._last_logged, self._unwritten_metrics = (self.step, now), None
        values: dict[str, Any] = {"step": self.step}
        if self._options["total_steps"] is not None:
            values["total_steps"] = self._options["total_steps"]
        if self.step > last_step and math.isfinite(last_time):
            values["step_time_s"] = round((now - last_time) / (self.step - last_step), 6)
        if self.device.type == "cuda":
            values["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if slowest_rank is not None:
            values |= {
                "slowest_rank": slowest_rank.rank,
                "slowest_own_s": round(slowest_rank.seconds, 6),
                "median_own_s": round(slowest_rank.median, 6),
            }
            self.print(
                f"rank {slowest_rank.rank} is slow: {slowest_rank.seconds:.3g} s per step without "
                "waiting for "
                "other ranks, "
                f"{slowest_rank.median:.3g} s is the median"
            )
        self._metrics.write({**values, **metrics})

    def _exit_stale(self) -> None:
        already_reported = self.checkpoints.stale  # then the save has already reported it
        message = f"attempt {self.run.attempt} ends: the run belongs to attempt {self.run.leased_to()} now"
        if self.rank == 0 and not already_reported:
            sys.stderr.write(message + "\n")
        raise StaleAttempt(message)

    def _save_and_exit(self) -> bool:
        if not self._state:
            return True
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # launchers signal the ranks that exit after the first
        self.checkpoint(wait=True)
        self.print(f"received a signal: saved a checkpoint after step {self.step}, exits with code {GO_ON}")
        raise Leave(GO_ON)


def _device(requested_device: str | torch.device | None, place: RankInfo) -> torch.device:
    """Return this process's device, and make it the current device if it is a GPU."""
    if requested_device is not None:
        device = torch.device(requested_device)
    elif torch.cuda.is_available():
        # Some clusters show a process all GPUs of its node, others only its own: the modulo works for both.
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
