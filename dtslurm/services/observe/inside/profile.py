"""Profile ranks of a running job: traces for Perfetto, and where each rank spends its time.

py-spy observes the stacks of a process from outside. torch.profiler records the operations of steps, in a
process that trains with `dtslurm.train` and finds a request on its node (`dtslurm.train.profiling`), or that
was started with KINETO_USE_DAEMON and asks for requests itself (`dtslurm.worker.probe.torch_request`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dtslurm import assets
from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.live import StackFrame
from dtslurm.model.runs.profile import RankMemory, RankProfile
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.services.observe.inside.execute import CommandStreams, execute
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.wiring.context import Context
from dtslurm.views.profile import TraceEvent, summarize
from dtslurm.views.step_memory import MemoryEvent, summarize_memory
from dtslurm.views.step_profile import (
    Interval,
    Operation,
    find_common_time,
    find_marked_steps,
    summarize_steps,
)

Tool = Literal["py-spy", "torch", "memory"]
_MISSING = 127
_NOT_TAKEN = 4
_LABEL = re.compile(rb"\[([A-Za-z0-9_/-]+)\] (.*)")
_LARGEST_TRACE = 1 << 26  # bytes; reading more would take gigabytes of memory
_LONGEST_STEP_S = 120
_LARGEST_NUMBER = 1e19  # nanoseconds since 1970 are less
# srun passes lines of up to 1024 bytes on in one piece; it mixes longer lines of several nodes.
# py-spy may be beside the Python of the rank, which need not be on PATH. It does not stop the rank.
_RECORD = """\
python=$(tr '\\0' '\\n' <"/proc/$DTSLURM_PID/cmdline" | head -n 1)
case "$python" in */*) PATH=$PATH:${python%/*} ;; esac
command -v py-spy >/dev/null || exit 127
file=$(mktemp) || exit
trap 'rm -f "$file"' EXIT
py-spy record --pid "$DTSLURM_PID" --duration "$1" --rate 100 --format chrometrace --output "$file" \
  --threads --idle --full-filenames --nonblocking >&2 </dev/null || exit
gzip -c "$file" | base64 -w 700
"""
_RECORD_STEPS = """\
variables=$(cat "/proc/$DTSLURM_PID/environ" 2>/dev/null | tr '\\0' '\\n')
if [ -z "$3" ] && printf '%s\\n' "$variables" | grep -q ^KINETO_IPC_SOCKET_DIR=; then
  exec "$(readlink "/proc/$DTSLURM_PID/exe")" -I -c "$4" "$DTSLURM_PID" "$1" "$2" </dev/null
fi
umask 077
folder=$(mktemp -d) || exit
name=$(printf %s "$DTSLURM_RUN_DIR" | tr / _ | tail -c 150)
request=${TMPDIR:-/tmp}/dtslurm-profile-$name-${RANK:-0}
trap 'rm -rf "$folder"; rm -f "$request"' EXIT
trap 'exit 1' HUP INT TERM
printf '%s\\n' "$1" "$folder/trace.json" ${3:+"$3"} >"$folder/request" || exit
mv -fT "$folder/request" "$request" || exit
waited=0
until [ -e "$folder/trace.json" ]; do
  if [ -e "$folder/trace.json.error" ]; then cat "$folder/trace.json.error" >&2; exit 1; fi
  kill -0 "$DTSLURM_PID" 2>/dev/null || { echo "the rank has ended" >&2; exit 1; }
  if [ -e "$request" ]; then
    waited=$((waited + 1))
    [ "$waited" -le $((5 * $2)) ] || exit 4
  fi
  sleep 0.2
done
gzip -c "$folder/trace.json" | base64 -w 700
"""


@dataclass(frozen=True)
class RecordedProfile:
    """The profile of a rank.

    Attributes:
        trace: the trace of all its threads in the JSON format of Chrome, which Perfetto opens.
    """

    summary: RankProfile | RankMemory
    trace: bytes


@dataclass(frozen=True, kw_only=True)
class RankAnswers:
    """What commands in the place of ranks printed.

    Attributes:
        code: their highest exit code.
        lines: each line of stdout with the label of its rank, the lowest rank first; those of a rank in their
            order.
        problems: the last lines of stderr.
    """

    code: int
    lines: Sequence[tuple[str, bytes]]
    problems: Sequence[str]


@dataclass(frozen=True)
class ProfileRequest:
    """What to record.

    Attributes:
        tool: what records it: py-spy, torch.profiler, or torch.profiler with allocations of memory.
        amount: seconds of py-spy, steps of torch.
    """

    tool: Tool
    amount: int


def record_profiles(
    context: Context,
    record: JobRecord,
    target: ProcessSelector,
    request: ProfileRequest,
    *,
    task: str | None = None,
) -> list[RecordedProfile]:
    """Return the profiles of ranks of a running job, the lowest rank first.

    Raises:
        RequestInvalid: the job does not run, has no such part, py-spy is not installed there, or the ranks do
            not train with `dtslurm.train`.
        TransportError: the ranks cannot be profiled, or the connection was lost.
    """
    is_of_torch = request.tool != "py-spy"
    script = _RECORD_STEPS if is_of_torch else _RECORD
    command = ["sh", "-c", script, "dtslurm-profile", str(request.amount), str(_LONGEST_STEP_S)]
    if is_of_torch:
        program = assets.worker("probe/torch_request.py").read_text("utf-8")
        command += ["memory" if request.tool == "memory" else "", program]
    answer = ask_ranks(context, record, target, command, task=task)
    code = answer.code
    if code == _MISSING:
        raise RequestInvalid(
            ["py-spy is not installed where the ranks run"],
            hint="install it in the environment of the job: pip install py-spy",
        )
    if code == _NOT_TAKEN and is_of_torch:
        raise RequestInvalid(
            [f"no rank has begun to record steps within {_LONGEST_STEP_S} s"],
            hint=f"--with {request.tool} needs a training loop that calls end_step of dtslurm.train"
            + (" or a job submitted with --env KINETO_USE_DAEMON=1" if request.tool == "torch" else "")
            + "; --with py-spy needs neither",
        )
    if code:
        is_forbidden = not is_of_torch and any("ermission" in line for line in answer.problems)
        raise TransportError(
            "the ranks cannot be profiled",
            evidence=answer.problems,
            hint="py-spy must be allowed to read processes of its user (kernel.yama.ptrace_scope=0)"
            if is_forbidden
            else "",
        )
    pieces: dict[str, list[bytes]] = {}
    for label, piece in answer.lines:
        pieces.setdefault(label, []).append(piece)
    traces = {label: decode_base64(request.tool, b"".join(lines)) for label, lines in pieces.items()}
    if request.tool == "torch":
        return interpret_step_traces(traces)
    return [interpret_trace(request.tool, label, packed) for label, packed in traces.items()]


def ask_ranks(
    context: Context,
    record: JobRecord,
    target: ProcessSelector,
    command: Sequence[str],
    *,
    task: str | None,
) -> RankAnswers:
    """Run a command in the place of each selected rank; return what it printed.

    Raises:
        RequestInvalid: the job does not run, or has no such part.
        TransportError: the connection was lost.
    """
    outputs, problems = bytearray(), bytearray()

    def write(out: bytes, err: bytes) -> None:
        outputs.extend(out)
        problems.extend(err)

    streams = CommandStreams(write, has_labels=True)
    code = execute(context, record, target, command, task=task, streams=streams)
    lines = [(label.decode(), data) for label, data in _LABEL.findall(bytes(outputs))]
    lines.sort(key=lambda line: _order_of(line[0]))
    text = bytes(problems).decode("utf-8", "replace")
    return RankAnswers(
        code=code, lines=lines, problems=[line for line in text.splitlines() if line.strip()][-5:]
    )


def _order_of(label: str) -> tuple[str, int]:
    """Return the key by which ranks and instances are sorted."""
    role, _, number = label.rpartition("/")
    return role, int(number) if number.isdecimal() else 0


def decode_base64(tool: str, data: bytes) -> bytes:
    """Return bytes that a rank printed in base64.

    Raises:
        InvalidAnswer: the data is damaged.
    """
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise answers.invalid(tool, f"damaged data ({error})") from error


def interpret_step_traces(traces: Mapping[str, bytes]) -> list[RecordedProfile]:
    """Return the traces of ranks that train together, with summaries of the time that all of them recorded.

    Raises:
        InvalidAnswer: one of them is no trace, or too large.
    """
    # Each is read twice, because the operations of all ranks at once would take gigabytes of memory.
    steps = [_find_marked_steps(packed) for packed in traces.values()]
    marked = [step for step in steps if step is not None]
    common = find_common_time(marked) if len(marked) == len(steps) else None
    found = [interpret_trace("torch", label, packed, common) for label, packed in traces.items()]
    # Ranks that ask for requests themselves do that at different times, and do not mark steps.
    if common is not None or len(marked) < len(steps):
        return found
    return [
        replace(item, summary=replace(item.summary, is_comparable=False))
        for item in found
        if isinstance(item.summary, RankProfile)
    ]


def interpret_trace(tool: str, label: str, packed: bytes, common: Interval | None = None) -> RecordedProfile:
    """Return the trace of a rank with its summary: of its own steps, or of a time in microseconds since 1970.

    Raises:
        InvalidAnswer: it is no trace, or too large.
    """
    trace = answers.unpack(packed, tool, limit=_LARGEST_TRACE)
    if tool != "py-spy":
        document, events = _parse_trace(tool, trace)
        operations = list(_read_operations(events))
        if tool == "memory":
            return RecordedProfile(summarize_memory(label, operations, _read_allocations(events)), trace)
        origin_us = _read_origin(document)
        cut = (common[0] - origin_us, common[1] - origin_us) if common is not None else None
        return RecordedProfile(summarize_steps(label, operations, cut), trace)
    document = answers.parse_json(trace, tool, limit=_LARGEST_TRACE)
    if not isinstance(document, list):
        raise answers.invalid(tool, "JSON that is not a list")
    return RecordedProfile(summarize(label, _read_events(document)), trace)


def _find_marked_steps(packed: bytes) -> Interval | None:
    """Return the time of the marked steps of a trace in microseconds since 1970."""
    trace = answers.unpack(packed, "torch", limit=_LARGEST_TRACE)
    document, events = _parse_trace("torch", trace)
    steps = find_marked_steps(list(_read_operations(events)))
    origin_us = _read_origin(document)
    return (steps[0] + origin_us, steps[1] + origin_us) if steps is not None else None


def _parse_trace(tool: str, trace: bytes) -> tuple[dict[str, Any], list[Any]]:
    document = answers.parse_json(trace, tool, limit=_LARGEST_TRACE)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise answers.invalid(tool, "JSON without the list traceEvents")
    return document, events


def _read_origin(document: dict[str, Any]) -> float:
    """Return when the clock of a trace began, in microseconds since 1970; it is 1970 in older traces."""
    return (_read_number(document.get("baseTimeNanoseconds")) or 0.0) / 1e3


def _read_operations(values: list[Any]) -> Iterator[Operation]:
    """Yield the operations of a trace; events of another form are left out."""
    for value in values:
        if not isinstance(value, dict) or value.get("ph") != "X":
            continue
        name, category = value.get("name"), value.get("cat")
        start_us, length_us = _read_number(value.get("ts")), _read_number(value.get("dur"))
        if not (isinstance(name, str) and isinstance(category, str)) or start_us is None or length_us is None:
            continue
        yield Operation(
            name=_clean(name),
            category=category,
            thread=_name_thread(value),
            start_us=start_us,
            end_us=start_us + max(0.0, length_us),
        )


def _read_allocations(values: list[Any]) -> Iterator[MemoryEvent]:
    """Yield the allocations of a trace; events of another form are left out."""
    names = ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved")
    for value in values:
        if not isinstance(value, dict) or value.get("name") != "[memory]":
            continue
        details = value.get("args")
        numbers = [_read_number(details.get(name)) for name in names] if isinstance(details, dict) else [None]
        time_us = _read_number(value.get("ts"))
        known = [int(number) for number in numbers if number is not None]
        if time_us is None or len(known) < len(names):
            continue
        device_type, device, size, allocated, reserved = known
        yield MemoryEvent(
            time_us=time_us,
            thread=_name_thread(value),
            device_type=device_type,
            device=device,
            size=size,
            allocated=allocated,
            reserved=reserved,
        )


def _name_thread(event: dict[str, Any]) -> str:
    return f"{event.get('pid')} {event.get('tid')}"


def _read_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _LARGEST_NUMBER else None  # not of NaN


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
