"""Profile ranks of a running job with py-spy: traces for Perfetto, and where each rank spends its time."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.live import StackFrame
from dtslurm.model.runs.profile import RankProfile
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.services.observe.inside.execute import CommandStreams, execute
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.wiring.context import Context
from dtslurm.views.profile import TraceEvent, summarize

_SENDER = "py-spy"
_MISSING = 127
_LABEL = re.compile(rb"\[([A-Za-z0-9_/-]+)\] (.*)")
_LARGEST_TRACE = answers.LARGEST
# py-spy may be beside the Python of the rank, which need not be on PATH. It does not stop the rank.
_RECORD = """\
python=$(tr '\\0' '\\n' <"/proc/$DTSLURM_PID/cmdline" | head -n 1)
case "$python" in */*) PATH=$PATH:${python%/*} ;; esac
command -v py-spy >/dev/null || exit 127
file=$(mktemp) || exit
trap 'rm -f "$file"' EXIT
py-spy record --pid "$DTSLURM_PID" --duration "$1" --rate 100 --format chrometrace --output "$file" \
  --threads --idle --full-filenames --nonblocking >&2 </dev/null || exit
gzip -c "$file" | base64 | tr -d '\\n'
echo
"""


@dataclass(frozen=True)
class RecordedProfile:
    """The profile of a rank.

    Attributes:
        trace: the trace of all its threads in the JSON format of Chrome, which Perfetto opens.
    """

    summary: RankProfile
    trace: bytes


def record_profiles(
    context: Context, record: JobRecord, target: ProcessSelector, seconds: int, *, task: str | None = None
) -> list[RecordedProfile]:
    """Return the profiles of ranks of a running job, the lowest rank first.

    Raises:
        RequestInvalid: the job does not run, has no such part, or py-spy is not installed there.
        TransportError: py-spy may not read the ranks, or the connection was lost.
    """
    outputs, problems = bytearray(), bytearray()

    def write(out: bytes, err: bytes) -> None:
        outputs.extend(out)
        problems.extend(err)

    command = ["sh", "-c", _RECORD, "dtslurm-profile", str(seconds)]
    streams = CommandStreams(write, has_labels=True)
    code = execute(context, record, target, command, task=task, streams=streams)
    if code == _MISSING:
        raise RequestInvalid(
            ["py-spy is not installed where the ranks run"],
            hint="install it in the environment of the job: pip install py-spy",
        )
    if code:
        text = bytes(problems).decode("utf-8", "replace")
        raise TransportError(
            "the ranks cannot be profiled",
            evidence=[line for line in text.splitlines() if line.strip()][-5:],
            hint="py-spy must be allowed to read processes of its user (kernel.yama.ptrace_scope=0)"
            if "ermission" in text
            else "",
        )
    return [_interpret(label.decode(), data) for label, data in _LABEL.findall(bytes(outputs))]


def _interpret(label: str, data: bytes) -> RecordedProfile:
    try:
        packed = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise answers.invalid(_SENDER, f"damaged data ({error})") from error
    trace = answers.unpack(packed, _SENDER, limit=_LARGEST_TRACE)
    events = answers.parse_json(trace, _SENDER)
    if not isinstance(events, list):
        raise answers.invalid(_SENDER, "JSON that is not a list")
    return RecordedProfile(summarize(label, _read_events(events)), trace)


def _read_events(values: list[Any]) -> Iterator[TraceEvent]:
    """Yield the events of a trace; those of another form are left out."""
    for value in values:
        if not isinstance(value, dict) or value.get("ph") not in {"B", "E"}:
            continue
        details = value.get("args")
        file, line = (details.get("filename"), details.get("line")) if isinstance(details, dict) else ("", 0)
        numbers = (value.get("ts"), value.get("tid"), line)
        texts = (value.get("name"), file)
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(number, int) and not isinstance(number, bool) for number in numbers
        ):
            continue
        frame = StackFrame(function=_clean(str(texts[0])), file=_clean(str(texts[1])), line=numbers[2] or 0)
        yield TraceEvent(
            time_us=numbers[0] or 0, thread=numbers[1] or 0, begins=value["ph"] == "B", frame=frame
        )


def _clean(text: str) -> str:
    """Return a name without control characters, which the ranks could choose."""
    return "".join(character if character.isprintable() else "?" for character in text)[:400]
