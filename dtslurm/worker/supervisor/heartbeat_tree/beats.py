"""The format of a heartbeat over TCP, and the file with the address of the supervisor."""

import json
from typing import Any, Dict, NamedTuple

FAN_OUT = 128  # two levels below the supervisor are enough for 16,512 nodes
ADDRESS = "supervisor.json"  # where the supervisor listens, and the attempt's key
FILE_EVERY_S = 60.0  # between the heartbeats in a file, of a node without a link to the supervisor


class Beat(NamedTuple):
    """A heartbeat of a node.

    Attributes:
        kind: ``beat``, or ``bye`` for a farewell.
        time: by the node's own clock.
        restarted: whether the supervisor had restarted the agent.
        activity: one letter for each kind of activity of its ranks in the last seconds: `COMPUTING`,
            `TRANSFERRING`, `STOPPED`.
        output: bytes that its ranks have written to their logs.
        rank_count: number of its ranks.
        ranks: the state of its ranks, as JSON.
    """

    kind: str
    time: float
    restarted: bool
    activity: str
    output: int
    rank_count: int
    ranks: bytes


COMPUTING, TRANSFERRING, STOPPED = "c", "t", "s"  # letters of `Beat.activity`; "-" if there is none
CODES = {("beat", False): b"b", ("beat", True): b"r", ("bye", False): b"e", ("bye", True): b"f"}
FAREWELLS = (CODES["bye", False], CODES["bye", True])
_KINDS = {code: kind for kind, code in CODES.items()}


def pack_beat(node: str, beat: Beat) -> bytes:
    """Return a heartbeat as one line, which nodes pass on as it is."""
    code = CODES[beat.kind, beat.restarted].decode()
    counts = "{} {}".format(beat.output, beat.rank_count)
    return " ".join((node, code, repr(beat.time), beat.activity or "-", counts, "")).encode() + beat.ranks


def unpack_beat(line: bytes) -> Beat:
    """Return the heartbeat in a line.

    Raises:
        ValueError, KeyError: the line is malformed.
    """
    _, code, at, activity, output, rank_count, ranks = line.split(b" ", 6)
    kind, restarted = _KINDS[code]
    return Beat(kind, float(at), restarted, activity.decode(), int(output), int(rank_count), ranks)


def beat_of(record: Dict[str, Any]) -> Beat:
    """Return the heartbeat in the record of a file.

    Raises:
        KeyError, ValueError, TypeError: the record is malformed.
    """
    ranks = record["ranks"]
    return Beat(
        kind=str(record["kind"]),
        time=float(record["time"]),
        restarted=bool(record.get("restarted")),
        activity=str(record.get("activity") or COMPUTING),
        output=sum(int(process.get("output") or 0) for process in ranks.values()),
        rank_count=len(ranks),
        ranks=json.dumps(ranks).encode(),
    )
