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
from dtslurm.train.folder import CheckpointFile, Manifest
from dtslurm.train.foreign import is_foreign, planner_of, reader_of
from dtslurm.train.run_files import RunFiles, StaleAttempt
from dtslurm.train.state import (
    State,
    all_gather,
    broadcast,
    copy_to_cpu,
    get_rng_states,
    load_state_dicts,
    set_rng_states,
    size_of,
    state_dicts,
    templates,
)

# The warning is of no use in a single process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

_RNG_STATES = "_dice"  # the key of the states of the random number generators, by rank
READ_PATIENCE = 180.0  # seconds during which reading an unreadable checkpoint is retried
_READ_PAUSE = 2.0  # seconds between two of these retries
PATIENCE = 10.0  # seconds until a file that rank 0 sees must be visible on another node


class CheckpointFailed(StoreError):
    """A checkpoint could not be written or read; earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Restored:
    """The restored checkpoint: its step, the number of ranks that saved it, and its path."""

    step: int
    world_size: int
    path: Path


class Checkpointer:
    """Saves and restores training state; all ranks must call every method together.

    Args:
        folder: directory that holds one folder per checkpoint, shared by all nodes; by default
            ``$DTSLURM_CHECKPOINT_DIR``, or ``checkpoints``.
        keep: number of latest checkpoints to keep, None for all.
        run: the run's files, by default those the environment names; the run's lease is read before each
            commit.
        max_failures: number of consecutive background saves that may fail before `save` raises.
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
            raise RequestInvalid([f"keep={keep} would keep no checkpoint; keep at least 1"])
        self.folder = Path(folder or os.environ.get("DTSLURM_CHECKPOINT_DIR") or "checkpoints").absolute()
        self.keep, self.max_failures = keep, max_failures
        self.run = RunFiles.of() if run is None else run
        is_distributed = dist.is_available() and dist.is_initialized()
        # A separate gloo group, because background saves must not interleave with training's collectives.
        self._group = dist.new_group(backend="gloo") if is_distributed else None
        self.rank: int = dist.get_rank() if is_distributed else 0
        self.world_size: int = dist.get_world_size() if is_distributed else 1
        self._cpu_copy: Any = None
        self._pending_save: _Save | None = None
        self._failures = 0
        self.latest: Path | None = None
        self.metrics: Mapping[str, Any] = {}  # metrics of the step that is saved next

    def save(self, step: int, state: State, *, wait: bool = False) -> None:
        """Save models, optimizers and other objects with ``state_dict()`` and ``load_state_dict()``.

        The method first waits for the previous save. It returns when a copy is in CPU memory; a thread writes
        the copy while training continues. A save that fails in the background is reported on stderr and in
        ``events.jsonl``, and training continues; earlier checkpoints are unchanged.

        Args:
            step: number of finished steps.
            state: the objects to save, by names of the caller's choice.
            wait: return only when the checkpoint is complete.

        Raises:
            CheckpointFailed: this save failed (with ``wait``), or the previous ``max_failures`` saves failed.
            StaleAttempt: a later attempt of this run has begun.
            RequestInvalid: an object cannot be saved.
        """
        self.wait()
        if self._failures >= self.max_failures:
            raise CheckpointFailed(
                f"{self._failures} consecutive checkpoints could not be written to {self.folder}",
                evidence=[str(self._pending_save.error)] if self._pending_save else [],
                hint=(
                    "free disk space there, or save to another folder: training progress would be lost from "
                    "here on"
                ),
            )
        if (
            self._pending_save is None
            or self._pending_save.step != step
            or self._pending_save.error is not None
        ):
            values = {**state_dicts(state), _RNG_STATES: {str(self.rank): get_rng_states()}}
            self._cpu_copy = copy_to_cpu(values, self._cpu_copy)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            attempt = broadcast(secrets.token_hex(4), self._group)
            unfinished_folder = self.folder / f".writing-{store.name_of(step, self.run.attempt)}-{attempt}"
            self._pending_save = _Save(
                step, partial(self._write, step, unfinished_folder, self._cpu_copy, dict(self.metrics))
            )
            self._pending_save.start()
        if wait:
            self.wait(failing=True)

    def wait(self, *, failing: bool = False) -> None:
        """Wait for the save in progress, if there is one.

        Args:
            failing: raise if the save failed, instead of ignoring the failure.

        Raises:
            CheckpointFailed: the save failed on any rank.
            StaleAttempt: a later attempt of this run has begun.
        """
        save = self._pending_save
        if save is None:
            return
        save.join()
        if isinstance(save.error, StaleAttempt):
            raise save.error
        if failing and save.error is not None:
            raise save.error

    def give_up(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the save in progress, and ignore its outcome."""
        if self._pending_save is not None:
            self._pending_save.join(timeout)

    @property
    def stale(self) -> bool:
        """Whether a save detected that a later attempt has begun."""
        return self._pending_save is not None and isinstance(self._pending_save.error, StaleAttempt)

    def restore(self, state: State) -> Restored | None:
        """Restore the latest intact checkpoint; return None if the folder has never had a checkpoint.

        A checkpoint whose files are missing, truncated or changed is reported on stderr, renamed to
        ``….corrupt`` and skipped. Reading a checkpoint that cannot be read now (a stale file handle, no
        permission, an input or output error) is retried for `READ_PATIENCE` seconds. The number of ranks may
        differ from the number that saved the checkpoint. If it is the same, the random number generators
        continue from their saved states.

        Raises:
            CheckpointFailed: the latest checkpoint cannot be read or does not match these objects, or all
                checkpoints are damaged.
            StaleAttempt: a later attempt of this run has begun.
            RequestInvalid: an object cannot be restored.
        """
        self.claim()
        start = time.perf_counter()
        names = self._run_on_rank_0(self._list_checkpoints)
        for name in names:
            path = self.folder / name
            manifest, problem = self._read_intact_manifest(path)
            if manifest is None:
                self._run_on_rank_0(lambda path=path, problem=problem: self._set_aside(path, problem))
                continue
            self._load(path, manifest, state)
            self.latest = path
            if self.rank == 0:
                size = sum(file.size for file in manifest.files)
                seconds = round(time.perf_counter() - start, 3)
                self.run.event("restored", step=manifest.step, path=str(path), seconds=seconds, bytes=size)
            return Restored(manifest.step, manifest.world_size, path)
        damaged_paths, saved_names = self._run_on_rank_0(self._find_lost)
        if damaged_paths:
            raise CheckpointFailed(
                f"no checkpoint in {self.folder} is intact",
                evidence=damaged_paths[:8],
                hint="restore an intact checkpoint, or move the damaged checkpoints away to start at step 0",
            )
        if saved_names:
            raise CheckpointFailed(
                f"{self.folder} has no checkpoint, although this run saved {saved_names} there",
                hint="restore a checkpoint, or submit the script as a new run to start at step 0",
            )
        return None

    def _run_on_rank_0(self, function: Any) -> Any:
        """Run ``function`` on rank 0; return its result, or raise its error, on every rank."""
        result: Any = None
        if self.rank == 0:
            try:
                result = function()
            except OSError as error:
                result = error
            except StaleAttempt as error:
                _print_error(error.message)
                result = error
        result = broadcast(result, self._group)
        if isinstance(result, OSError):
            raise CheckpointFailed(
                f"the checkpoint folder {self.folder} cannot be used", evidence=[str(result)]
            ) from result
        if isinstance(result, StaleAttempt):
            raise result
        return result

    def claim(self) -> None:
        """Take the run's lease, so that only this attempt may write.

        Raises:
            StaleAttempt: a later attempt has begun.
        """
        self._run_on_rank_0(self.run.take_lease)

    def _list_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, latest first; retry transient errors."""
        deadline = time.monotonic() + READ_PATIENCE
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                store.sweep(self.folder, self.run.attempt)
                return [path.name for path in store.list_checkpoints(self.folder)]
            except (FileExistsError, NotADirectoryError):  # a file in the place of a folder does not go away
                raise
            except OSError as error:
                if time.monotonic() > deadline:
                    raise
                _print_error(
                    f"the checkpoint folder {self.folder} cannot be used at the moment: {error}; retrying"
                )
                time.sleep(_READ_PAUSE)

    def _find_lost(self) -> tuple[list[str], int]:
        """Return the damaged checkpoints' names, and the number of saves that the run's events report."""
        return [path.name for path in store.find_damaged(self.folder)], self.run.count_saved(self.folder)

    def _read_intact_manifest(self, path: Path) -> tuple[Manifest | None, str]:
        """Return the manifest of an intact checkpoint, or None and the damage; retry read errors.

        Raises:
            CheckpointFailed: some rank cannot read the checkpoint, or a later version wrote it.
        """
        deadline = time.monotonic() + READ_PATIENCE
        is_reported = False
        while True:
            manifest, damage, read_error = self._inspect_checkpoint(path)
            if not read_error:
                return (None, damage) if damage else (manifest, "")
            if broadcast(time.monotonic() > deadline, self._group):
                raise CheckpointFailed(
                    f"{path} cannot be read",
                    evidence=[read_error],
                    hint=(
                        "restart when the checkpoint can be read, or move it away to continue from the "
                        "previous checkpoint"
                    ),
                )
            if self.rank == 0 and not is_reported:
                _print_error(
                    f"{path} cannot be read at the moment: {read_error}; retrying for {READ_PATIENCE:.0f} s"
                )
                is_reported = True
            time.sleep(_READ_PAUSE)

    def _inspect_checkpoint(self, path: Path) -> tuple[Manifest | None, str, str]:
        """Return a checkpoint's manifest, its damage, and its read error; all ranks share the check."""
        manifest, damage, read_error = broadcast(self._read_manifest(path), self._group)
        if isinstance(read_error, store.LaterVersion):
            raise CheckpointFailed(
                f"{path} was written by a later version of dtslurm",
                evidence=[str(read_error)],
                hint=(
                    "install that version, or move the checkpoint away to continue from the previous "
                    "checkpoint"
                ),
            )
        if manifest is not None and not read_error:
            own_files = manifest.files[self.rank :: self.world_size]
            checks = all_gather(_check_files(path, own_files), self._group)
            damage = next((message for message, _ in checks if message), "")
            read_error = next((message for _, message in checks if message), "")
        return manifest, damage, "" if damage else read_error

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
        new_path = store.set_aside(path, "corrupt")
        _print_error(
            f"{path} is damaged: {problem}; the previous checkpoint is used instead, and this one is "
            f"renamed {new_path.name}"
        )
        self.run.event("checkpoint_corrupt", path=str(new_path), problem=problem)

    def _load(self, path: Path, manifest: Manifest, state: State) -> None:
        try:
            metadata = reader_of(path).read_metadata()
            values = templates(state, metadata)
            if manifest.world_size == self.world_size:
                values[_RNG_STATES] = {str(self.rank): self._rng_template(metadata)}
            dcp.load(
                values, storage_reader=reader_of(path), planner=planner_of(path), process_group=self._group
            )
        except (Exception, CheckpointException) as error:
            hint = (
                "restore the objects that were saved, under the same names, or move the checkpoint away to "
                "start at step 0"
            )
            if isinstance(error, OSError) or any(
                isinstance(failure, OSError) for failure in _failures(error)
            ):
                raise CheckpointFailed(
                    f"{path} cannot be read", evidence=[*_exception_lines(error)]
                ) from error
            if is_foreign(path):
                hint = (
                    "other users can write to this checkpoint, so only plain values are accepted; to "
                    f"accept more, run chmod -R go-w {path}"
                )
            raise CheckpointFailed(
                f"{path} is intact, but does not match the objects to restore",
                evidence=[*_exception_lines(error)],
                hint=hint,
            ) from error
        load_state_dicts(state, values)
        if _RNG_STATES in values:
            set_rng_states(values[_RNG_STATES][str(self.rank)])

    def _rng_template(self, metadata: Metadata) -> dict[str, torch.Tensor]:
        prefix = f"{_RNG_STATES}.{self.rank}."
        return {
            name[len(prefix) :]: torch.empty(meta.size, dtype=torch.uint8)
            for name, meta in metadata.state_dict_metadata.items()
            if name.startswith(prefix)
        }

    # ---- In the writer thread

    def _write(
        self, step: int, unfinished_folder: Path, values: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> None:
        """Write and commit a checkpoint; raise on all ranks if any rank fails."""
        start = time.monotonic()
        try:
            writer = dcp.FileSystemWriter(str(unfinished_folder))
            dcp.save(dict(values), storage_writer=writer, process_group=self._group)
            file_names = self._run_on_all_ranks(lambda: self._read_file_names(unfinished_folder))[0]
            files = self._run_on_all_ranks(lambda: self._checksum_own_files(unfinished_folder, file_names))
            paths = self._run_on_all_ranks(
                lambda: self._commit(step, unfinished_folder, files) if self.rank == 0 else None
            )
        except StaleAttempt:
            self._remove_unfinished(unfinished_folder)
            raise
        except (Exception, CheckpointException) as error:
            failure = self._record_failure(step, error)
            self._remove_unfinished(unfinished_folder)
            raise failure from error
        self._failures = 0
        self.latest = paths[0]
        if self.rank == 0:
            seconds = round(time.monotonic() - start, 3)
            self.run.event("checkpoint", step=step, path=str(self.latest), seconds=seconds)
            self._register_and_prune(self.latest, step, metrics)

    def _register_and_prune(self, checkpoint: Path, step: int, metrics: Mapping[str, Any]) -> None:
        """Register a checkpoint as an artifact, and delete checkpoints beyond the ``keep`` latest."""
        try:
            self.run.artifact(store.describe_artifact(checkpoint, step), metrics)
            store.prune(self.folder, self.keep, self.run.pinned(self.folder))
        except (OSError, ValueError) as error:
            _print_error(f"{checkpoint} is written; older checkpoints are not deleted yet: {error}")

    def _run_on_all_ranks(self, function: Any) -> list[Any]:
        """Run ``function`` on each rank and return all results; raise an error of any rank on all ranks."""
        try:
            own_result = function()
        except (Exception, StaleAttempt) as error:  # noqa: BLE001 - raised below, after the all_gather
            own_result = error
        results = all_gather(own_result, self._group)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _read_file_names(self, folder: Path) -> set[str]:
        """Return the names of all ranks' files on rank 0; `dcp.save` of torch 2.11 does not return them."""
        if self.rank != 0:
            return set()
        index = reader_of(folder).read_metadata()
        return {storage_info.relative_path for storage_info in index.storage_data.values()}

    def _checksum_own_files(self, folder: Path, file_names: set[str]) -> list[CheckpointFile]:
        """Return the checksums of this rank's files, which the index names; all of these files must exist."""
        own_paths = sorted(folder / name for name in file_names if name.startswith(f"__{self.rank}_"))
        if self.rank == 0:
            own_paths.append(folder / ".metadata")
            store.close_to_others(folder)
        for path in own_paths:
            store.close_to_others(path)
        return [store.checksum(path, sync=True) for path in own_paths]

    def _commit(self, step: int, unfinished_folder: Path, files: list[list[CheckpointFile]]) -> Path:
        try:
            self.run.check_lease()
        except StaleAttempt as error:
            _print_error(error.message)
            raise
        all_files = tuple(file for share in files for file in share)
        return store.commit(
            unfinished_folder, Manifest(step, self.run.attempt, self.world_size, all_files, time.time())
        )

    def _remove_unfinished(self, folder: Path) -> None:
        if self.rank == 0:
            store.remove(folder)

    def _record_failure(self, step: int, error: BaseException) -> CheckpointFailed:
        evidence = _exception_lines(error)
        is_disk_full = any("No space left" in line or "Disk quota" in line for line in evidence)
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(self.folder).free
            evidence.append(f"{free_bytes / 2**20:.1f} MiB are free in {self.folder}")
            # torch's message for a failed write gives no reason
            is_disk_full = is_disk_full or free_bytes < size_of(self._cpu_copy)
        last_good = (
            f"the last good checkpoint is {self.latest}" if self.latest else "there is no earlier checkpoint"
        )
        self._failures += 1
        failure = CheckpointFailed(
            f"the checkpoint of step {step} was not written; {last_good}",
            evidence=evidence,
            hint=f"free disk space in {self.folder}" if is_disk_full else "",
        )
        if self.rank == 0:
            _print_error("\n".join(failure.lines()))
            self.run.event("checkpoint_failed", step=step, problem=" ".join(evidence)[:500])
        return failure


class _Save(threading.Thread):
    """Thread that runs one save."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        # A daemon thread: if a rank fails, the interpreter must not wait for ranks that will never respond.
        super().__init__(name="checkpoint", daemon=True)
        self.step = step
        self.error: CheckpointFailed | StaleAttempt | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except (CheckpointFailed, StaleAttempt) as error:
            self.error = error


def _check_files(path: Path, files: Sequence[CheckpointFile]) -> tuple[str, str]:
    """Return the damage of some of a checkpoint's files, and their read error; empty texts for none."""
    try:
        return store.find_damage(path, files, PATIENCE), ""
    except OSError as error:
        return "", f"{error} on {os.uname().nodename}"


def _print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _exception_lines(error: BaseException) -> list[str]:
    """Return an exception's message as lines, without the tracebacks of torch's CheckpointException."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return [
            f"rank {rank}: {_format_exception(failure[0])}" for rank, failure in sorted(failures.items())
        ][:8]
    return [_format_exception(error)]


def _format_exception(error: BaseException) -> str:
    """Return an exception in the form that Python prints, with its file name."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{type(error).__name__}: {error.strerror}: {error.filename}"
    return repr(error)


def _failures(error: BaseException) -> list[Any]:
    """Return the ranks' exceptions in a torch CheckpointException, or an empty list."""
    failures = getattr(error, "failures", None)
    return [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
