"""The run's own ledger: its attempts, how they ended, and how far training came."""

import errno
import json
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ..evidence.evidence import json_lines
from .files import json_of, names_in, try_for, try_put

_CHECKPOINTS = "checkpoints.json"


class Ended(NamedTuple):
    """How one attempt ended.

    Attributes:
        cause: the slug that ``dtslurm diagnose`` gives, or checkpointed, time-limit, preempted, hang, done.
        blame: who can put it right: code, node, site, user or unknown.
        progressed: whether training came further than ever before; None where nothing tells.
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
    """What is remembered of the attempts of a run, over requeues; all in the run directory."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.events_path = os.path.join(run_dir, "events.jsonl")

    def event(
        self, name: str, attempt: Optional[int] = None, *, patience_s: float = 0.0, **values: Any
    ) -> None:
        """Append one event, in one write; it is lost where the disk refuses it for longer than patience_s."""
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
                line = b"\n" + line  # half a line is there, from when the disk became full
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def begin(self) -> int:
        """Return the number of a new attempt: the first whose log folder nobody made before."""
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
        """Return all events of a name, in order."""
        return [record for record in json_lines(self.events_path) if record.get("event") == name]

    def history(self) -> List[Ended]:
        """Return how the attempts so far have ended, oldest first."""
        counted = {one.get("attempt") for one in self.events("decision") if one.get("counted")}
        return [
            Ended(
                attempt=int(one.get("attempt", 0)),
                exit_code=int(one.get("exit_code") or 0),
                cause=str(one.get("cause", "unknown")),
                blame=str(one.get("blame", "unknown")),
                rank=one.get("rank"),
                node=one.get("node"),
                summary=str(one.get("summary", "")),
                progressed=one.get("progressed"),
                counted=one.get("attempt") in counted,
            )
            for one in self.events("attempt_ended")
        ]

    def close_open(self) -> None:
        """Record the end of attempts that could not do so: whoever kept them was lost with its node."""
        ended = {one.get("attempt") for one in self.events("attempt_ended")}
        for one in self.events("attempt"):
            number = one.get("attempt")
            if isinstance(number, int) and number not in ended:
                summary = "its job ended without a word: the first node was lost, or Slurm started it anew"
                values: Dict[str, Any] = {"summary": summary, "step": self.step_of(number)}
                values["progressed"] = self.progressed(number)
                self.event("attempt_ended", number, exit_code=None, cause="lost", blame="node", **values)

    def left_open(self) -> Tuple[Optional[int], int]:
        """Return the last attempt if nobody told its end, or asked for another since; and its world size."""
        number, world_size = None, 0
        for one in json_lines(self.events_path):
            if one.get("event") == "attempt" and isinstance(one.get("attempt"), int):
                number, world_size = one["attempt"], int(one.get("world_size") or 0)
            elif one.get("event") in {"attempt_ended", "requeue"}:
                number = None
        return number, world_size

    def excluded(self) -> List[str]:
        """Return the nodes that this run no longer wants, in the order they were found bad."""
        return list(
            dict.fromkeys(str(one["node"]) for one in self.events("node_excluded") if one.get("node"))
        )

    def seconds_since_first_start(self, now: float) -> float:
        """Return how long ago the run's first attempt began; ``now`` is by the controller's clock.

        Its event has the time by that clock as ``slurm_time``; ``time`` is by the clock of its node.
        """
        times = [
            float(one.get("slurm_time") or one["time"]) for one in self.events("attempt") if "time" in one
        ]
        return max(0.0, now - min(times)) if times else 0.0

    # ---- progress ----

    def step_of(self, attempt: int) -> Optional[int]:
        """Return the highest training step that an attempt has told of."""
        path = os.path.join(self.run_dir, "metrics", str(attempt), "train.jsonl")
        steps = [one["step"] for one in json_lines(path) if isinstance(one.get("step"), int)]
        return max(steps) if steps else None

    def note_checkpoints(self, attempt: int) -> None:
        """Record what is in the checkpoint folder as an attempt begins, for `progressed`."""
        folder = os.path.join(self.run_dir, "ranks", str(attempt))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return
        try_put(os.path.join(folder, _CHECKPOINTS), json.dumps({"changed": self._checkpoints()}))

    def progressed(self, attempt: int) -> Optional[bool]:
        """Tell whether an attempt came further than all before it; None where nothing tells.

        Compares the steps that training reports; without them, the files in the checkpoint folder with those
        at the beginning of the attempt. Their times are not compared with a clock: those of the node and of
        the file server may differ.
        """
        step = self.step_of(attempt)
        if step is not None:
            before = [self.step_of(number) for number in range(attempt)]
            return step > max([number for number in before if number is not None] or [-1])
        noted = json_of(os.path.join(self.run_dir, "ranks", str(attempt), _CHECKPOINTS)).get("changed")
        now = self._checkpoints()
        if not isinstance(noted, dict) or not now:
            return None
        return any(noted.get(name) != changed for name, changed in now.items())

    def _checkpoints(self) -> Dict[str, int]:
        """Return what is in the checkpoint folder, each with the time of its last change."""
        folder = os.environ.get("DTSLURM_CHECKPOINT_DIR") or os.path.join(self.run_dir, "checkpoints")
        found = {}
        for name in names_in(folder):
            try:
                found[name] = os.stat(os.path.join(folder, name)).st_mtime_ns
            except OSError:
                continue
        return found
