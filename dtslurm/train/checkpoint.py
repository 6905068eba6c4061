"""Checkpoints that are complete or do not exist, on torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # no Exception: of one or more ranks
from torch.distributed.checkpoint.metadata import Metadata

from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.train import folder as store
from dtslurm.train.folder import Manifest, Saved
from dtslurm.train.foreign import is_foreign, planner_of, reader_of
from dtslurm.train.run_files import RunFiles, StaleAttempt
from dtslurm.train.state import (
    State,
    all_gather,
    broadcast,
    dice,
    load_state_dicts,
    set_dice,
    size_of,
    staged,
    state_dicts,
    templates,
)

# A process alone needs no telling that it is.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

_DICE = "_dice"  # each rank's own random numbers, by rank
READ_PATIENCE = 180.0  # seconds in which a checkpoint that cannot be read is tried again
_READ_PAUSE = 2.0
PATIENCE = 10.0  # seconds in which a file that rank 0 sees may still be unseen on another node


class CheckpointFailed(StoreError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


@dataclass(frozen=True)
class Restored:
    """What was restored: the step at which it was saved, and by how many ranks."""

    step: int
    world_size: int
    path: Path


class Checkpointer:
    """Saves and restores training state, all ranks together; every method is called by all of them.

    Args:
        folder: where checkpoints are kept, one folder each, seen by all nodes; by default
            ``$DTSLURM_CHECKPOINT_DIR``, or ``checkpoints``.
        keep: how many of the latest are kept, None for all.
        run: the run's files, by default those the environment names; its lease is read before each commit.
        max_failures: how many saves in the background may fail in a row before `save` raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = 3,
        run: RunFiles | None = None,
        max_failures: int = 3,
    ) -> None:
        if keep is not None and keep < 1:
            raise RequestInvalid([f"keep={keep} would keep no checkpoint at all"])
        self.folder = Path(folder or os.environ.get("DTSLURM_CHECKPOINT_DIR") or "checkpoints").absolute()
        self.keep, self.max_failures = keep, max_failures
        self.run = RunFiles.of() if run is None else run
        joined = dist.is_available() and dist.is_initialized()
        # Gloo, and of its own: saves in the background must not get in between training's collectives.
        self._group = dist.new_group(backend="gloo") if joined else None
        self.rank: int = dist.get_rank() if joined else 0
        self.world_size: int = dist.get_world_size() if joined else 1
        self._copy: Any = None
        self._save: _Save | None = None
        self._failures = 0
        self.latest: Path | None = None
        self.metrics: Mapping[str, Any] = {}  # what training told of the step that is saved next

    def save(self, step: int, state: State, *, wait: bool = False) -> None:
        """Save models, optimizers and whatever else has ``state_dict()`` and ``load_state_dict()``.

        It returns when a copy is in the CPU's memory; a thread writes it, while training goes on. A save
        before this one is waited for. One that fails in the background is told on stderr and in
        ``events.jsonl``, and training goes on: the checkpoints before it are as they were.

        Args:
            step: how many steps are done.
            state: what to save, by names of the caller's choice.
            wait: return only when the checkpoint is complete.

        Raises:
            CheckpointFailed: it, or ``max_failures`` saves in a row before it, could not be written.
            StaleAttempt: a later attempt of this run has begun.
            RequestInvalid: an object cannot be saved.
        """
        self.wait()
        if self._failures >= self.max_failures:
            raise CheckpointFailed(
                f"{self._failures} checkpoints in a row could not be written in {self.folder}",
                evidence=[str(self._save.error)] if self._save else [],
                hint="make room there, or save elsewhere: what is trained from here on would be lost",
            )
        if self._save is None or self._save.step != step or self._save.error is not None:
            values = {**state_dicts(state), _DICE: {str(self.rank): dice()}}
            self._copy = staged(values, self._copy)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            attempt = broadcast(secrets.token_hex(4), self._group)
            writing = self.folder / f".writing-{store.name_of(step, self.run.attempt)}-{attempt}"
            self._save = _Save(step, partial(self._write, step, writing, self._copy, dict(self.metrics)))
            self._save.start()
        if wait:
            self.wait(failing=True)

    def wait(self, *, failing: bool = False) -> None:
        """Wait for the save that is under way, if one is.

        Args:
            failing: raise if it failed, rather than let it be.

        Raises:
            CheckpointFailed: it failed, on any rank.
            StaleAttempt: a later attempt of this run has begun.
        """
        save = self._save
        if save is None:
            return
        save.join()
        if isinstance(save.error, StaleAttempt):
            raise save.error
        if failing and save.error is not None:
            raise save.error

    def give_up(self, timeout: float) -> None:
        """Give a save that is under way so many seconds more; what comes of it does not matter then."""
        if self._save is not None:
            self._save.join(timeout)

    @property
    def stale(self) -> bool:
        """Whether a save found out that a later attempt has begun."""
        return self._save is not None and isinstance(self._save.error, StaleAttempt)

    def restore(self, state: State) -> Restored | None:
        """Restore the latest checkpoint that is whole; None if the folder has never had a checkpoint.

        A checkpoint whose files are missing, cut or changed is reported on stderr, renamed to ``….corrupt``
        and passed over. One that cannot be read now (a stale file handle, no permission, an input or output
        error) is tried again for `READ_PATIENCE` seconds. Another number of ranks than it was saved by is
        fine. Random numbers go on as they were if the number of ranks is the same.

        Raises:
            CheckpointFailed: the latest one cannot be read, or is not of these objects, or all are damaged.
            StaleAttempt: a later attempt of this run has begun.
            RequestInvalid: an object cannot be restored.
        """
        self.claim()
        began = time.perf_counter()
        names = self._first(self._list_checkpoints)
        for name in names:
            path = self.folder / name
            manifest, problem = self._judged(path)
            if manifest is None:
                self._first(lambda path=path, problem=problem: self._set_aside(path, problem))
                continue
            self._load(path, manifest, state)
            self.latest = path
            if self.rank == 0:
                size = sum(file.size for file in manifest.files)
                took = round(time.perf_counter() - began, 3)
                self.run.event("restored", step=manifest.step, path=str(path), seconds=took, bytes=size)
            return Restored(manifest.step, manifest.world_size, path)
        damaged, saved = self._first(self._find_lost)
        if damaged:
            raise CheckpointFailed(
                f"no checkpoint in {self.folder} is whole",
                evidence=damaged[:8],
                hint="bring one back, or move these away to begin at step 0",
            )
        if saved:
            raise CheckpointFailed(
                f"{self.folder} has no checkpoint, and this run has saved {saved} there",
                hint="bring one back, or submit the script again to begin at step 0",
            )
        return None

    def _first(self, act: Any) -> Any:
        """Return what ``act`` gives on rank 0, on every rank, and raise there what it raises."""
        result: Any = None
        if self.rank == 0:
            try:
                result = act()
            except OSError as error:
                result = error
            except StaleAttempt as error:
                _say(error.message)
                result = error
        result = broadcast(result, self._group)
        if isinstance(result, OSError):
            raise CheckpointFailed(f"{self.folder} cannot be used", evidence=[str(result)]) from result
        if isinstance(result, StaleAttempt):
            raise result
        return result

    def claim(self) -> None:
        """Make this the attempt that writes.

        Raises:
            StaleAttempt: a later one has begun.
        """
        self._first(self.run.take_lease)

    def _list_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, latest first; try again for a while if that fails."""
        end = time.monotonic() + READ_PATIENCE
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                store.sweep(self.folder, self.run.attempt)
                return [path.name for path in store.candidates(self.folder)]
            except OSError as error:
                if time.monotonic() > end:
                    raise
                _say(f"{self.folder} cannot be used now: {error}; trying again")
                time.sleep(_READ_PAUSE)

    def _find_lost(self) -> tuple[list[str], int]:
        """Return the names of damaged checkpoints, and how many the run's events report as saved."""
        return [path.name for path in store.find_damaged(self.folder)], self.run.count_saved(self.folder)

    def _judged(self, path: Path) -> tuple[Manifest | None, str]:
        """Return a checkpoint's manifest if it is whole, else why it is damaged.

        Raises:
            CheckpointFailed: it cannot be read, on some rank, or is of a later version.
        """
        end = time.monotonic() + READ_PATIENCE
        reported = False
        while True:
            manifest, damage, obstacle = self._look_at(path)
            if not obstacle:
                return (None, damage) if damage else (manifest, "")
            if broadcast(time.monotonic() > end, self._group):
                raise CheckpointFailed(
                    f"{path} cannot be read",
                    evidence=[obstacle],
                    hint="start again when it can, or move it away to go on from the one before",
                )
            if self.rank == 0 and not reported:
                _say(f"{path} cannot be read now: {obstacle}; trying again for {READ_PATIENCE:.0f} s")
                reported = True
            time.sleep(_READ_PAUSE)

    def _look_at(self, path: Path) -> tuple[Manifest | None, str, str]:
        """Return a checkpoint's manifest, what is damaged, and what keeps it from being read."""
        manifest, damage, obstacle = broadcast(self._read_manifest(path), self._group)
        if isinstance(obstacle, store.LaterVersion):
            raise CheckpointFailed(
                f"{path} was written by a later version of dtslurm",
                evidence=[str(obstacle)],
                hint="install that version again, or move it away to go on from the one before",
            )
        if manifest is not None and not obstacle:
            share = manifest.files[self.rank :: self.world_size]
            seen = all_gather(_look_for_damage(path, share), self._group)
            damage = next((one for one, _ in seen if one), "")
            obstacle = next((one for _, one in seen if one), "")
        return manifest, damage, "" if damage else obstacle

    def _read_manifest(self, path: Path) -> tuple[Manifest | None, str, Any]:
        if self.rank != 0:
            return None, "", ""
        try:
            return Manifest.read(path), "", ""
        except store.LaterVersion as error:
            return None, "", error
        except (FileNotFoundError, ValueError) as error:
            return None, f"{store.MANIFEST}: {error}", ""
        except OSError as error:
            return None, "", str(error)

    def _set_aside(self, path: Path, problem: str) -> None:
        aside = store.set_aside(path, "corrupt")
        _say(f"{path} is not whole: {problem}; going back to the one before (it is kept as {aside.name})")
        self.run.event("checkpoint_corrupt", path=str(aside), problem=problem)

    def _load(self, path: Path, manifest: Manifest, state: State) -> None:
        try:
            saved = reader_of(path).read_metadata()
            values = templates(state, saved)
            if manifest.world_size == self.world_size:
                values[_DICE] = {str(self.rank): self._dice_template(saved)}
            dcp.load(
                values, storage_reader=reader_of(path), planner=planner_of(path), process_group=self._group
            )
        except (Exception, CheckpointException) as error:
            hint = "restore what was saved, by the same names, or move the checkpoint away to begin anew"
            if isinstance(error, OSError) or any(isinstance(one, OSError) for one in _failures(error)):
                raise CheckpointFailed(f"{path} cannot be read", evidence=[*_lines(error)]) from error
            if is_foreign(path):
                hint = f"others can write to it, so it may hold plain values only; or: chmod -R go-w {path}"
            raise CheckpointFailed(
                f"{path} is whole, but not of what is to be restored", evidence=[*_lines(error)], hint=hint
            ) from error
        load_state_dicts(state, values)
        if _DICE in values:
            set_dice(values[_DICE][str(self.rank)])

    def _dice_template(self, saved: Metadata) -> dict[str, torch.Tensor]:
        prefix = f"{_DICE}.{self.rank}."
        return {
            name[len(prefix) :]: torch.empty(meta.size, dtype=torch.uint8)
            for name, meta in saved.state_dict_metadata.items()
            if name.startswith(prefix)
        }

    # ---- In the thread that writes

    def _write(self, step: int, writing: Path, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write and commit; whatever goes wrong on any rank is raised on all of them."""
        began = time.monotonic()
        try:
            writer = dcp.FileSystemWriter(str(writing))
            dcp.save(dict(values), storage_writer=writer, process_group=self._group)
            written = self._agreed(lambda: self._read_file_names(writing))[0]
            files = self._agreed(lambda: self._own_files(writing, written))
            done = self._agreed(lambda: self._commit(step, writing, files) if self.rank == 0 else None)
        except StaleAttempt:
            self._forget(writing)
            raise
        except (Exception, CheckpointException) as error:
            failed = self._failed(step, error)
            self._forget(writing)
            raise failed from error
        self._failures = 0
        self.latest = done[0]
        if self.rank == 0:
            seconds = round(time.monotonic() - began, 3)
            self.run.event("checkpoint", step=step, path=str(self.latest), seconds=seconds)
            self._tidy(self.latest, step, metrics)

    def _tidy(self, latest: Path, step: int, metrics: Mapping[str, Any]) -> None:
        """Register a checkpoint, and delete those that it makes superfluous."""
        try:
            self.run.artifact(store.registered(latest, step), metrics)
            store.prune(self.folder, self.keep, self.run.pinned(self.folder))
        except (OSError, ValueError) as error:
            _say(f"{latest} is written; no older one is deleted for now: {error}")

    def _agreed(self, act: Any) -> list[Any]:
        """Return what ``act`` gives on each rank; raise on all of them what it raises on one."""
        try:
            mine = act()
        except (Exception, StaleAttempt) as error:  # noqa: BLE001 - raised below; the other ranks wait for it
            mine = error
        found = all_gather(mine, self._group)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def _read_file_names(self, writing: Path) -> set[str]:
        """Read the names of all ranks' files on rank 0; `dcp.save` of torch 2.11 does not return them."""
        if self.rank != 0:
            return set()
        index = reader_of(writing).read_metadata()
        return {place.relative_path for place in index.storage_data.values()}

    def _own_files(self, writing: Path, written: set[str]) -> list[Saved]:
        """Return this rank's files, which must all be there: by the index, not by a look at the folder."""
        mine = sorted(writing / name for name in written if name.startswith(f"__{self.rank}_"))
        if self.rank == 0:
            mine.append(writing / ".metadata")
            store.close_to_others(writing)
        for path in mine:
            store.close_to_others(path)
        return [store.checksum(path, sync=True) for path in mine]

    def _commit(self, step: int, writing: Path, files: list[list[Saved]]) -> Path:
        try:
            self.run.check_lease()
        except StaleAttempt as error:
            _say(error.message)
            raise
        every = tuple(file for share in files for file in share)
        return store.commit(writing, Manifest(step, self.run.attempt, self.world_size, every, time.time()))

    def _forget(self, writing: Path) -> None:
        if self.rank == 0:
            store.remove(writing)

    def _failed(self, step: int, error: BaseException) -> CheckpointFailed:
        evidence = _lines(error)
        full = any("No space left" in line or "Disk quota" in line for line in evidence)
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.folder).free
            evidence.append(f"{free / 2**20:.1f} MiB are free in {self.folder}")
            full = full or free < size_of(self._copy)  # torch's words of a failed write name no reason
        good = f"the last good one is {self.latest}" if self.latest else "there is none before it"
        self._failures += 1
        failed = CheckpointFailed(
            f"the checkpoint of step {step} was not written; {good}",
            evidence=evidence,
            hint=f"make room in {self.folder}" if full else "",
        )
        if self.rank == 0:
            _say("\n".join(failed.lines()))
            self.run.event("checkpoint_failed", step=step, problem=" ".join(evidence)[:500])
        return failed


class _Save(threading.Thread):
    """One save under way."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        # A daemon: where a rank fails, the interpreter must not wait for others that will never answer.
        super().__init__(name="checkpoint", daemon=True)
        self.step = step
        self.error: CheckpointFailed | StaleAttempt | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except (CheckpointFailed, StaleAttempt) as error:
            self.error = error


def _look_for_damage(path: Path, files: Sequence[Saved]) -> tuple[str, str]:
    """Return what is damaged of some files, and what keeps them from being read."""
    try:
        return store.find_damage(path, files, PATIENCE), ""
    except OSError as error:
        return "", f"{error} on {os.uname().nodename}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _lines(error: BaseException) -> list[str]:
    """Return an exception's own words; torch's exception for several ranks would print tracebacks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return [f"rank {rank}: {_in_words(one[0])}" for rank, one in sorted(failures.items())][:8]
    return [_in_words(error)]


def _in_words(error: BaseException) -> str:
    """Return an exception as Python would print it, with the file that it is about."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{type(error).__name__}: {error.strerror}: {error.filename}"
    return repr(error)


def _failures(error: BaseException) -> list[Any]:
    """Return the exceptions of ranks that torch's exception holds."""
    failures = getattr(error, "failures", None)
    return [one[0] for one in failures.values()] if isinstance(failures, dict) else []
