"""The messages about a run, from its events. Pure functions.

Each message has a key that follows from the events alone, so every program that reads them finds the same
messages, and each message can be claimed by one sender.
"""

import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from ..lib.json_records import finite_number

SENT, FAILED = "message_sent", "message_failed"  # events that a sender writes
TRIES = 4  # of each message and address, by all senders together
PAUSE_S = 60.0  # between two tries
_LAST_LINES = 8
_LONGEST_LINE = 200
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
_ESCAPE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[@-Z\\\\-_]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?)")
_NOT_REPORTED = {"cancelled"}  # causes of ends that the user brought about

Event = Dict[str, Any]
ReadOutput = Callable[[int, int], str]


class Message(NamedTuple):
    """A message about one event of a run.

    Attributes:
        key: identifies the event within the run; it is part of a file name.
        about: the event, as the end of a sentence about the job.
        kind: one of Apprise's types: info, success, warning, failure.
        time: when the event happened, in seconds since the epoch.
    """

    key: str
    about: str
    kind: str
    time: float
    title: str
    lines: List[str]

    @property
    def body(self) -> str:
        """The text of the message."""
        return "\n".join(self.lines)


class RunState(NamedTuple):
    """What the events do not contain.

    Attributes:
        name, cluster: the names of the run and of its cluster.
        state: the state in which the scheduler reports the end of the job, such as NODE_FAIL; empty if it
            reports none.
        cancelled: whether the run was cancelled.
    """

    name: str
    cluster: str = ""
    state: str = ""
    cancelled: bool = False


def list_messages(
    events: Iterable[Event], run: RunState, read_output: ReadOutput = lambda _attempt, _rank: ""
) -> List[Message]:
    """Return the messages about a run, in the order of their events.

    Args:
        read_output: returns the end of the output of a rank: (attempt, rank).
    """
    history = _History(run, read_output)
    for event in events:
        history.read(event)
    history.read_state()
    return history.messages


def is_due(
    events: Iterable[Event], messages: Iterable[Message], addresses: int, now: float, patience_s: float
) -> bool:
    """Return whether a message should be sent now by another sender than the job.

    Args:
        addresses: the number of addresses.
        patience_s: how long a message is left to the job.
    """
    results = [event for event in events if event.get("event") in {SENT, FAILED}]
    for message in messages:
        for address in range(addresses):
            tries = [
                event
                for event in results
                if event.get("message") == message.key and event.get("address") == address
            ]
            last = tries[-1] if tries else {"time": message.time - PAUSE_S + patience_s}
            is_over = last.get("event") == SENT or last.get("final") is True or len(tries) >= TRIES
            if not is_over and now - (finite_number(last.get("time")) or 0.0) >= PAUSE_S:
                return True
    return False


class _History:
    """The messages of the events that were read so far."""

    def __init__(self, run: RunState, read_output: ReadOutput) -> None:
        self.run, self.read_output = run, read_output
        self.messages: List[Message] = []
        self.job = ""
        self.starts = 0  # of the job
        self.attempt: Optional[Event] = None
        self.ends: Dict[Any, Event] = {}  # by attempt
        self.exit_code: Any = None  # of the batch script, of the last start
        self.time = 0.0

    def read(self, event: Event) -> None:
        """Add the message of an event, if it has one."""
        name = event.get("event")
        if name in {SENT, FAILED}:
            return
        self.time = finite_number(event.get("time")) or self.time
        if event.get("job_id"):
            self.job = _clean(event["job_id"])
        if name == "started":
            self.starts += 1
            self.exit_code = None
        elif name == "attempt":
            self._add_start(event)
        elif name == "attempt_ended":
            self.ends[event.get("attempt")] = event
        elif name in {"hang", "stalled"}:
            lines = [_clean(event.get("summary")) or "no rank writes output or computes"]
            self._add("stalled-{}".format(event.get("attempt")), "warning", "stalled", lines)
        elif name == "limit_expected":
            lines = [_clean(event.get("summary"))]
            self._add("limit-{}".format(self.starts), "warning", "will reach its time limit", lines)
        elif name == "ended":
            self.exit_code = event.get("exit_code")
            if event.get("final"):
                self._add_end("")

    def read_state(self) -> None:
        """Add the message of an end that only the scheduler reports."""
        if self.run.state:
            self._add_end(self.run.state)

    def _add_start(self, event: Event) -> None:
        before = self.attempt
        self.attempt = event
        nodes = event.get("nodes")
        size = event.get("world_size")
        lines = ["{} {} on {}".format(size, "rank" if size == 1 else "ranks", _list_nodes(nodes))]
        if before is None:
            self._add("started", "info", "started", lines)
            return
        end = self.ends.get(before.get("attempt"), {})
        summary = _clean(end.get("summary") or end.get("cause"))
        if summary:
            lines.insert(0, "attempt {} ended: {}".format(before.get("attempt"), summary))
        self._add("restarted-{}".format(event.get("attempt")), "warning", "restarted", lines)

    def _add_end(self, state: str) -> None:
        number = self.attempt.get("attempt") if self.attempt else None
        end = self.ends.get(number, {})
        key = "end-{}".format(self.starts)
        if self.run.cancelled or end.get("cause") in _NOT_REPORTED or state == "CANCELLED":
            return
        if state == "COMPLETED" or (not state and self.exit_code == 0):
            self._add(key, "success", "done", ["the job ended with exit code 0"])
            return
        lines = self._describe_failure(number, end)
        if state and state != "FAILED":
            lines.insert(0, "Slurm reports {}".format(_clean(state)))
        lines.append("to look further: dtslurm diagnose {}".format(self.job))
        self._add(key, "failure", "failed", lines)

    def _describe_failure(self, number: Any, end: Event) -> List[str]:
        code_text = "" if self.exit_code is None else "exit code {}".format(self.exit_code)
        if not end:
            place = "before training started" if number is None else "without a record of its attempt"
            return ["the job ended {}{}".format(place, code_text and ", with " + code_text)]
        rank, node = end.get("rank"), end.get("node")
        lines = ["cause: {}: {}".format(_clean(end.get("cause")), _clean(end.get("summary")))]
        places = ["rank {}".format(rank)] if isinstance(rank, int) else []
        places += ["node {}".format(_clean(node))] if node else []
        lines.append(", ".join([*places, "attempt {}".format(number), *filter(None, [code_text])]))
        if isinstance(number, int):
            output = self.read_output(number, rank if isinstance(rank, int) else 0)
            last_lines = [_clean(line) for line in output.splitlines() if line.strip()][-_LAST_LINES:]
            if last_lines:
                lines.append("last lines of rank {}:".format(rank if isinstance(rank, int) else 0))
                lines += ["  " + line for line in last_lines]
        return lines

    def _add(self, key: str, kind: str, about: str, lines: List[str]) -> None:
        if any(message.key == key for message in self.messages):
            return
        cluster = " on {}".format(_clean(self.run.cluster)) if self.run.cluster else ""
        title = "job {} ({}){} {}".format(self.job, _clean(self.run.name), cluster, about)
        self.messages.append(Message(key, about, kind, self.time, title, lines))


def _list_nodes(nodes: Any) -> str:
    names = [_clean(name) for name in nodes] if isinstance(nodes, list) else []
    more = ", and {} more".format(len(names) - 4) if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _clean(value: Any) -> str:
    """Return a value as one short line without control characters."""
    text = "" if value is None else str(value)
    text = _CONTROL.sub("", _ESCAPE.sub("", text)).replace("\n", " ").replace("\t", "    ").rstrip()
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"
