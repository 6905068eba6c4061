"""The run's ledger: its attempts, how each of them ended, and the progress of training."""

import errno
import json
import os
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..lib.json_records import finite_number, read_lines, read_object, whole_number
from .files import names_in, try_for, try_put

_CHECKPOINTS = "checkpoints.json"
_Position = Tuple[float, int]  # epoch and step


class _Span(NamedTuple):
    """The first and the last position in training that an attempt reported."""

    first: _Position
    last: _Position


class AttemptEnd(NamedTuple):
    """The end of one attempt.

    Attributes:
        cause: the slug that ``dtslurm diagnose`` gives, or checkpointed, time-limit, preempted, hang, done.
        blame: who can fix the cause: code, node, site, user or unknown.
        progressed: whether training progressed further than in all earlier attempts; None if unknown.
    """

    attempt: int
    exit_code: int
    cause: str
    blame: str = "unknown"
    rank: Optional[int] = None
    node: Optional[str] = None
    summary: str = ""
    advice: str = ""
    progressed: Optional[bool] = None
    counted: bool = False


class Ledger:
    """The record of a run's attempts, kept in the run directory across requeues."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.events_path = os.path.join(run_dir, "events.jsonl")
        self._spans: Dict[int, Optional[_Span]] = {}  # of attempts that have ended

    def event(
        self, name: str, attempt: Optional[int] = None, *, patience_s: float = 0.0, **values: Any
    ) -> None:
        """Append one event with a single write; drop it if writing fails for longer than patience_s."""
        record: Dict[str, Any] = {"time": round(time.time(), 3), "event": name}
        if attempt is not None:
            record["attempt"] = attempt
        record.update(values)
        line = json.dumps(record).encode() + b"\n"
        try_for(lambda: self._append(line), patience_s)

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.events_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # an earlier write was cut off when the disk became full
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def begin(self) -> int:
        """Return the number of a new attempt: the first number without a log folder, which it creates."""
        folder = os.path.join(self.run_dir, "logs")
        used = [int(name) for name in names_in(folder) if name.isdigit()]
        number = max(used) + 1 if used else 0
        while True:
            try:
                os.makedirs(os.path.join(folder, str(number)))
            except FileExistsError:
                number += 1
            else:
                return number

    def events(self, name: str) -> List[Dict[str, Any]]:
        """Return all events with this name, in order."""
        return [record for record in read_lines(self.events_path) if record.get("event") == name]

    def history(self) -> List[AttemptEnd]:
        """Return the ends of all attempts so far, oldest first."""
        counted_attempts = {
            decision.get("attempt") for decision in self.events("decision") if decision.get("counted")
        }
        return [
            AttemptEnd(
                attempt=int(event.get("attempt", 0)),
                exit_code=int(event.get("exit_code") or 0),
                cause=str(event.get("cause", "unknown")),
                blame=str(event.get("blame", "unknown")),
                rank=event.get("rank"),
                node=event.get("node"),
                summary=str(event.get("summary", "")),
                progressed=event.get("progressed"),
                counted=event.get("attempt") in counted_attempts,
            )
            for event in self.events("attempt_ended")
        ]

    def close_open(self) -> None:
        """Record an end for attempts without one: their supervisor was lost with its node."""
        ended_attempts = {event.get("attempt") for event in self.events("attempt_ended")}
        for event in self.events("attempt"):
            number = event.get("attempt")
            if isinstance(number, int) and number not in ended_attempts:
                summary = (
                    "the job ended without a record: the first node was lost, or Slurm started the job again"
                )
                values: Dict[str, Any] = {"summary": summary, "step": self.step_of(number)}
                values["progressed"] = self.progressed(number)
                self.event("attempt_ended", number, exit_code=None, cause="lost", blame="node", **values)

    def left_open(self) -> Tuple[Optional[int], int]:
        """Return the last attempt if it has no recorded end and no later requeue, and its world size."""
        number, world_size = None, 0
        for event in read_lines(self.events_path):
            if event.get("event") == "attempt" and isinstance(event.get("attempt"), int):
                number, world_size = event["attempt"], int(event.get("world_size") or 0)
            elif event.get("event") in {"attempt_ended", "requeue"}:
                number = None
        return number, world_size

    def excluded(self) -> List[str]:
        """Return the nodes that this run excludes, in the order in which they were found bad."""
        return list(
            dict.fromkeys(str(event["node"]) for event in self.events("node_excluded") if event.get("node"))
        )

    def seconds_since_first_start(self, now: float) -> float:
        """Return how long ago the run's first attempt began; ``now`` is a time of the controller's clock.

        The event's ``slurm_time`` is by the controller's clock as well; ``time`` is by the clock of the node.
        """
        start_times = [
            float(event.get("slurm_time") or event["time"])
            for event in self.events("attempt")
            if "time" in event
        ]
        return max(0.0, now - min(start_times)) if start_times else 0.0

    # ---- progress ----

    def step_of(self, attempt: int) -> Optional[int]:
        """Return the highest training step that an attempt reported."""
        path = os.path.join(self.run_dir, "metrics", str(attempt), "train.jsonl")
        steps = (whole_number(record.get("step")) for record in read_lines(path))
        return max((step for step in steps if step is not None), default=None)

    def note_checkpoints(self, attempt: int) -> None:
        """Record the contents of the checkpoint folder as an attempt begins, for `progressed`."""
        folder = os.path.join(self.run_dir, "ranks", str(attempt))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return
        try_put(os.path.join(folder, _CHECKPOINTS), json.dumps({"changed": self._list_checkpoints()}))

    def progressed(self, attempt: int) -> Optional[bool]:
        """Return whether an attempt progressed further than all earlier attempts; None if unknown.

        Compares the steps that training reports; without them, compares the files in the checkpoint folder
        with those at the beginning of the attempt. An attempt that repeats the steps of the attempt before
        made no progress even if it reached a few more steps, unless it saved a checkpoint.
        """
        span = self._span_of(attempt)
        if span is None:
            return self._has_saved(attempt)
        if self._find_repeated(attempt) is not None and not self._has_saved(attempt):
            return False
        spans = [self._span_of(number) for number in range(attempt)]
        return all(earlier is None or span.last > earlier.last for earlier in spans)

    def warn_of_repetition(self, attempt: int) -> str:
        """Return a warning if an attempt repeated steps, or if its progress is unknown; else empty text."""
        if self.progressed(attempt) is None and not self._list_checkpoints():
            return (
                "it is unknown whether training progresses from job to job, because there is no step in "
                "$DTSLURM_METRICS and no file in $DTSLURM_CHECKPOINT_DIR; a run that saves no checkpoint "
                "repeats the same steps"
            )
        span, repeated = self._span_of(attempt), self._find_repeated(attempt)
        if span is None or repeated is None:
            return ""
        text = "attempt {} began again at step {}, as attempt {} did, ".format(
            attempt, span.first[1], repeated
        )
        if self._list_checkpoints():
            text += "although $DTSLURM_CHECKPOINT_DIR contains checkpoints: "
            return text + "load the newest checkpoint at the start"
        return text + (
            "and $DTSLURM_CHECKPOINT_DIR contains nothing new: save a checkpoint before the time limit, "
            "and load the newest checkpoint at the start"
        )

    def _find_repeated(self, attempt: int) -> Optional[int]:
        """Return the last earlier attempt with steps if this attempt repeated its steps; None otherwise.

        It repeats them if its first step is not higher, and most of its steps had been reached before.
        """
        span = self._span_of(attempt)
        for number in range(attempt - 1, -1, -1):
            earlier = self._span_of(number)
            if span is not None and earlier is not None:
                balance = sum(1 if at <= earlier.last else -1 for at in self._positions_of(attempt))
                return number if span.first <= earlier.first and balance > 0 else None
        return None

    def _span_of(self, attempt: int) -> Optional[_Span]:
        """Return the first and the last position that an attempt reported; None without steps."""
        if attempt in self._spans:
            return self._spans[attempt]
        span: Optional[_Span] = None
        for at in self._positions_of(attempt):
            span = _Span(at, at) if span is None else _Span(min(span.first, at), max(span.last, at))
        if any(event.get("attempt") == attempt for event in self.events("attempt_ended")):
            self._spans[attempt] = span
        return span

    def _positions_of(self, attempt: int) -> Iterator[_Position]:
        """Yield the epoch and the step of each record; steps may begin again in each epoch."""
        path = os.path.join(self.run_dir, "metrics", str(attempt), "train.jsonl")
        for record in read_lines(path):
            step = whole_number(record.get("step"))
            if step is not None:
                yield finite_number(record.get("epoch")) or 0.0, step

    def _has_saved(self, attempt: int) -> Optional[bool]:
        """Return whether the checkpoint folder has changed since an attempt began; None if unknown.

        The times of the files are not compared with a clock, because the clocks of the node and of the file
        server may differ.
        """
        initial = read_object(os.path.join(self.run_dir, "ranks", str(attempt), _CHECKPOINTS)).get("changed")
        checkpoints = self._list_checkpoints()
        if not isinstance(initial, dict) or not checkpoints:
            return None
        return any(initial.get(name) != changed for name, changed in checkpoints.items())

    def _list_checkpoints(self) -> Dict[str, int]:
        """Return the entries of the checkpoint folder with their modification times in nanoseconds."""
        folder = os.environ.get("DTSLURM_CHECKPOINT_DIR") or os.path.join(self.run_dir, "checkpoints")
        modified_at = {}
        for name in names_in(folder):
            try:
                modified_at[name] = os.stat(os.path.join(folder, name)).st_mtime_ns
            except OSError:
                continue
        return modified_at
