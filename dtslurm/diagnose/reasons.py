"""Why one rank ended, told from its own record and log alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from dtslurm.diagnose.findings import Block, Findings, Hit, LogEvidence, Rank, Traceback, TraceFrame
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import EvidenceLine, Signature
from dtslurm.model.values import dataclass

EXCEPTION = 70  # strength of an uncaught Python exception that no signature knows
WEAK = 45  # below it, a reason stands back behind what others say of it
_NEAR = 20  # of reasons that near in strength, the one that comes first in the log counts
_PASSING = re.compile(
    r"\b(WARN(ING)?|INFO|DEBUG|retry(ing)?|fall(ing)? ?back|ignor(ed|ing)|skip(ped|ping)|attempt \d+)\b",
    re.IGNORECASE,
)
_FINAL = re.compile(r"NCCL WARN|stop|abort|exit|terminat", re.IGNORECASE)
_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 15: "SIGTERM", 24: "SIGXCPU", 31: "SIGSYS",
}  # fmt: skip
_TOLD_TO_END = {1, 2, 10, 12, 15}
# What Python says of errors that a program may have caught, logged and gone on after.
PLAIN = {"python-exception", "import-error", "nan-loss"}
_OF_PYTHON = {"python-exception", "import-error"}
_CRASHES = {"abort", "segfault", "bus-error"}
_AFTER_ITS_END = 20  # what an uncaught exception may lose of its strength at most
_SLURMS = 40  # strength from which a line is Slurm's own word on who ended a rank
_CAUGHT = 25  # strength of an exception that cannot have ended the process; below what the end itself tells
_PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
_COMPARED = 300  # characters of two lines of which each may be cut off

Kind = Literal["cause", "weak", "timeout", "lost-peer", "ended", "fine", "silent"]


@dataclass(frozen=True)
class Reason:
    """A possible reason of a rank's end.

    Attributes:
        strength: 0 to 100, how surely it alone tells why the rank ended.
        time: seconds since the epoch by the node's clock, if the line carries one.
        same: what reasons of the same kind on other ranks have in common.
    """

    cause: str
    role: str
    strength: int
    summary: str
    advice: str
    blame: str
    lines: tuple[EvidenceLine, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    time: float | None = None
    same: str = ""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: a cause of its own, a consequence of others', or nothing known."""

    rank: Rank
    kind: Kind
    reason: Reason | None = None


class Classifier:
    """Judges ranks by the signatures."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._signatures = {one.name: one for one in signatures}
        self._patterns = {
            one.name: [re.compile(pattern) for pattern in one.match] for one in self._signatures.values()
        }

    def end_of(self, rank: Rank, first: tuple[int, int] | None = None) -> RankEnd:
        """Return how a rank ended; ``first`` is the rank whose end was recorded first, and its exit code."""
        causes = list(self._causes(rank, first is not None and first[0] == rank.rank))
        best = _first_of_the_strongest(causes)
        told = _strongest(self._told(rank.log))
        if rank.exit_code in (0, WANTS_REQUEUE):
            return RankEnd(rank, "fine")
        if best is not None and best.strength >= WEAK:
            return RankEnd(rank, "cause", best)
        if told is not None:
            kind: Kind = "timeout" if told.role == "timeout" else "lost-peer"
            return RankEnd(rank, kind, told)
        by = self._ended(rank.log)
        alone = rank.signal in _TOLD_TO_END and not rank.told_to_end and not _failed_before(rank, first)
        if alone and (by is None or by.strength < _SLURMS):
            return RankEnd(rank, "weak", _from_outside(rank))
        if rank.signal in _TOLD_TO_END or by is not None:
            return RankEnd(rank, "ended", by)
        if rank.exit_code is None:
            return RankEnd(rank, "silent")
        code = _by_code(rank)
        return RankEnd(rank, "weak", best if best is not None and best.strength > code.strength else code)

    def others(self, findings: Findings) -> list[tuple[LogEvidence, Reason]]:
        """Return the causes that launchers and the batch script tell, strongest first."""
        found = [
            (log, reason)
            for log in findings.others
            for reason in self._from_log(log, None)
            if reason.role in ("cause", "ended", "timeout", "lost-peer")
        ]
        return sorted(found, key=lambda item: -item[1].strength)

    def _causes(self, rank: Rank, was_first: bool) -> Iterator[Reason]:
        for one in self._from_log(rank.log, rank.rank, rank.exit_code):
            if one.role == "cause":
                caught = _was_caught(one, rank, was_first)
                yield replace(one, strength=min(one.strength, _CAUGHT)) if caught else one
        if rank.error:
            line = EvidenceLine(rank=rank.rank, file=f"{rank.rank}.error.json", line=None, text=rank.error)
            reason = self._of_text(rank.error, rank.rank, rank.error_frame, (line,))
            if reason.role == "cause":
                yield reason
        yield from _by_signal(rank)

    def _told(self, log: LogEvidence) -> list[Reason]:
        return [
            one
            for one in self._from_log(log, log.rank)
            if one.role in ("timeout", "lost-peer") and one.strength > 0
        ]

    def _ended(self, log: LogEvidence) -> Reason | None:
        return _strongest([one for one in self._from_log(log, log.rank) if one.role == "ended"])

    def _from_log(self, log: LogEvidence, rank: int | None, code: int | None = None) -> Iterator[Reason]:
        covered: set[int] = set()
        chains = [
            (one, self._of_chain(one, log.file, rank))
            for one in log.tracebacks
            if one.blocks and not one.ignored
        ]
        uncaught = _uncaught([reason for _, reason in chains])
        for chain in log.tracebacks:
            covered.update(
                range(chain.line, max((block.line for block in chain.blocks), default=chain.line) + 1)
            )
        for chain, reason in chains:
            faded = _fading(chain.went_on, chain.after)
            if code == 1 and reason is uncaught and chain.blocks[-1].top == "<module>":
                faded = min(faded, _AFTER_ITS_END)  # it left the script; other threads and children may go on
            lost = (30 if reason.role == "cause" and reason is not uncaught else 0) + faded
            yield replace(reason, strength=max(0, reason.strength - lost))
        for hit in log.hits:
            if hit.line not in covered:
                yield self._of_hit(hit, log, rank)

    def _of_hit(self, hit: Hit, log: LogEvidence, rank: int | None) -> Reason:
        signature = self._signatures[hit.signature]
        lost = 0
        if not signature.lasting:
            lost = _fading(hit.went_on, hit.after)
            if _PASSING.search(hit.text) and not _FINAL.search(hit.text):
                lost = max(lost, 40)
        lines = (EvidenceLine(rank=rank, file=log.file, line=hit.line, text=hit.text),)
        reason = _by_signature(signature, hit.groups, lines)
        if reason.cause in ("segfault", "bus-error"):
            reason = _with_stack(reason, log, rank)
        return replace(reason, strength=max(0, signature.strength - lost), time=hit.time)

    def _of_chain(self, chain: Traceback, file: str, rank: int | None) -> Reason:
        """Return a chain's reason: the strongest; of equals the first cause, else the last.

        What another exception came in the handling of was caught: it counts no more, unless more than Python
        told of it.
        """
        best: Reason | None = None
        chosen = chain.blocks[0]
        for block in chain.blocks:
            reason = self._of_block(block, file, rank)
            later = block.link != "cause"
            handled = block.link == "context" and reason.role == "cause"
            if (
                best is None
                or reason.strength > best.strength
                or (later and reason.strength == best.strength)
                or (handled and best.cause in PLAIN)
            ):
                best, chosen = reason, block
        assert best is not None  # noqa: S101 - chains without blocks are not asked
        return _with_innermost(best, chosen, chain, file, rank)

    def _of_block(self, block: Block, file: str, rank: int | None) -> Reason:
        lines: list[EvidenceLine] = []
        if block.frame:
            frame = block.frame
            lines.append(
                EvidenceLine(rank=rank, file=file, line=block.frame_line + frame.offset, text=_place(frame))
            )
        lines.append(EvidenceLine(rank=rank, file=file, line=block.line, text=block.error))
        lines += _message_lines(block, file, rank)
        return self._of_text(f"{block.error}\n{block.more}", rank, block.frame, tuple(lines))

    def _of_text(
        self, text: str, rank: int | None, frame: TraceFrame | None, lines: tuple[EvidenceLine, ...]
    ) -> Reason:
        """Return the reason that an exception's own words give."""
        first = text.split("\n", 1)[0]
        found = self._signature_of(first)
        if found is None and (below := self._signature_of(text)) is not None:
            found = below if below[0].cause not in _CRASHES else None  # the output after it, not its message
        if found is not None and not (rank is not None and _runs_a_command(found[1], frame)):
            reason = _by_signature(found[0], found[1], lines)
            where = f", at {frame.file}:{frame.line}" if frame and found[0].role == "cause" else ""
            return replace(reason, summary=reason.summary + where)
        where = f" at {frame.file}:{frame.line} in {frame.function}" if frame else ""
        return Reason(
            cause="python-exception",
            role="cause",
            strength=EXCEPTION,
            summary=f"{first.strip()}{where}",
            advice="look at that line of the code; the rank's log has the whole stack",
            blame="code",
            lines=lines,
            groups={"type": first.split(":", 1)[0]},
            same=_masked(first),
        )

    def _signature_of(self, text: str) -> tuple[Signature, dict[str, str]] | None:
        best: tuple[Signature, dict[str, str]] | None = None
        for name, patterns in self._patterns.items():
            signature = self._signatures[name]
            if best is not None and signature.strength <= best[0].strength:
                continue
            if not any(word in text for word in signature.words):
                continue
            for pattern in patterns:
                match = pattern.search(text)
                if match:
                    best = signature, {key: value for key, value in match.groupdict().items() if value}
                    break
        return best


def _message_lines(block: Block, file: str, rank: int | None) -> list[EvidenceLine]:
    """Return the indented lines of a message; lines without indent may already be other output."""
    found = []
    for number, text in enumerate(block.more.split("\n"), block.line + 1):
        if not text.startswith((" ", "\t")):
            break
        found.append(EvidenceLine(rank=rank, file=file, line=number, text=text.replace("\t", "    ")))
    return found


def _with_innermost(reason: Reason, chosen: Block, chain: Traceback, file: str, rank: int | None) -> Reason:
    """Return a plain exception's reason with the exception in whose handling it was raised."""
    before = chain.blocks[chain.blocks.index(chosen) - 1] if chosen is not chain.blocks[0] else None
    if before is None or chosen.link != "context" or reason.cause not in PLAIN:
        return reason
    where = f" at {before.frame.file}:{before.frame.line}" if before.frame else ""
    line = EvidenceLine(rank=rank, file=file, line=before.line, text=before.error)
    summary = f"{reason.summary}; raised while {before.error.strip()}{where} was handled"
    return replace(reason, summary=summary, lines=(line, *reason.lines))


def _runs_a_command(groups: Mapping[str, str], frame: TraceFrame | None) -> bool:
    """Tell whether it is the user's own code, and no launcher, that ran a command which failed."""
    return (
        "command" in groups
        and frame is not None
        and frame.file.endswith(".py")
        and "-packages/" not in frame.file
    )


def _was_caught(reason: Reason, rank: Rank, was_first: bool) -> bool:
    """Tell whether an exception cannot be what ended the rank: no exception ends a process that way.

    One that the log ends with may be: the crash came as Python took the process down, the program chose the
    exit code, or the rank then hung and was killed, which cannot be where no other had failed before it.
    """
    line = reason.lines[-1].line if reason.lines else None
    chain = next((one for one in rank.log.tracebacks if one.blocks and line is not None and
                  one.line <= line <= max(block.line for block in one.blocks)), None)  # fmt: skip
    signal = signal_of(rank)
    if signal in (7, 9, 11):
        foreign = reason.cause in (PLAIN if chain else _OF_PYTHON)
        return foreign and ((signal == 9 and was_first) or not _ends_with(rank.log.tail, reason, chain))
    if signal is not None or rank.exit_code in (None, 1) or chain is None:
        return False
    return reason.cause in PLAIN and not _ends_with(rank.log.tail[-1:], reason, chain)


def _ends_with(tail: Sequence[str], reason: Reason, chain: Traceback | None) -> bool:
    texts = [line.text for line in reason.lines]
    if chain is not None:
        below = chain.blocks[-1].more.split("\n")  # of a message; what is not indented may be the log's own
        texts = [chain.blocks[-1].error, *(text for text in below if text.startswith((" ", "\t")))]
    last = {_PREFIX.sub("", line)[:_COMPARED] for line in tail}
    return not last or any(text and text[:_COMPARED] in last for text in texts)


def _uncaught(reasons: list[Reason]) -> Reason | None:
    """Return the last traceback's reason that is the rank's own fault: the earlier ones were caught."""
    own = [one for one in reasons if one.role == "cause"]
    chosen = own or reasons
    return chosen[-1] if chosen else None


def _fading(went_on: bool, after: int) -> int:
    """Return how much weaker a line is for what stands behind it in the log."""
    if went_on:
        return 60
    if after > 1 << 20:
        return 45
    return 25 if after > 1 << 16 else 0


def _first_of_the_strongest(reasons: list[Reason]) -> Reason | None:
    if not reasons:
        return None
    most = max(one.strength for one in reasons)
    near = [one for one in reasons if one.strength >= most - _NEAR and one.strength >= min(WEAK, most)]
    return min(near, key=_line)


def _line(reason: Reason) -> tuple[int, int]:
    line = reason.lines[0].line if reason.lines else None
    return (line if line is not None else 1 << 60, -reason.strength)


def _strongest(reasons: list[Reason]) -> Reason | None:
    return max(reasons, key=lambda one: one.strength, default=None)


def _by_signature(signature: Signature, groups: Mapping[str, str], lines: tuple[EvidenceLine, ...]) -> Reason:
    return Reason(
        cause=signature.cause,
        role=signature.role,
        strength=signature.strength,
        summary=fill(signature.summary, groups),
        advice=fill(signature.advice, groups),
        blame=signature.blame,
        lines=lines,
        groups=dict(groups),
        same=signature.name,
    )


def fill(sentence: str, groups: Mapping[str, str]) -> str:
    """Fill in ``{group}``; a part in ``[[ ]]`` goes away where one of its groups is missing."""

    def part(match: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)\}", match[1])
        return match[1] if all(groups.get(name) for name in names) else ""

    chosen = re.sub(r"\[\[(.*?)\]\]", part, sentence)
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1]) or "?", chosen).strip()


def _with_stack(reason: Reason, log: LogEvidence, rank: int | None) -> Reason:
    for chain in log.tracebacks:
        if chain.crash:
            line = EvidenceLine(rank=rank, file=log.file, line=chain.line, text=_place(chain.crash))
            where = f", at {chain.crash.file}:{chain.crash.line} in {chain.crash.function}"
            return replace(reason, lines=(*reason.lines, line), summary=reason.summary + where)
    return reason


def _place(frame: TraceFrame) -> str:
    code = f": {frame.code}" if frame.code else ""
    return f'File "{frame.file}", line {frame.line}, in {frame.function}{code}'


def _masked(text: str) -> str:
    return re.sub(r"\d+", "#", text)[:200]


def signal_of(rank: Rank) -> int | None:
    """Return the signal that ended a rank; codes above 128 that mean no signal are codes."""
    return rank.signal if rank.signal is not None and 0 < rank.signal <= 64 else None


def _by_signal(rank: Rank) -> Iterator[Reason]:
    signal = signal_of(rank)
    if signal is None or signal in _TOLD_TO_END:
        return
    name = _SIGNALS.get(signal, f"signal {signal}")
    if signal == 11:
        cause, strength, blame = "segfault", 76, "code"
        summary, advice = (
            "a library crashed the process (SIGSEGV)",
            "run with PYTHONFAULTHANDLER=1 to see where",
        )
    elif signal == 7:
        cause, strength, blame = "bus-error", 76, "site"
        summary = "the process touched memory that is not there (SIGBUS); most often /dev/shm is full"
        advice = "df -h /dev/shm on that node; fewer data-loader workers or a larger /dev/shm"
    elif signal == 9:
        cause, strength, blame = "killed", 40, "unknown"
        summary = (
            "killed by SIGKILL, and its log does not say why: by the kernel as memory ran out, or by hand"
        )
        advice = (
            "look at the node's memory (sacct -j JOB -o MaxRSS,ReqMem); ask for more by --mem if it was near"
        )
    else:
        cause, strength, blame = "abort" if signal == 6 else "killed", 38, "code"
        summary, advice = f"ended by {name}, and its log does not say why", "look at the end of its log"
    yield Reason(cause, "cause", strength, summary, advice, blame, _tail(rank), same=f"signal {signal}")


def _failed_before(rank: Rank, first: tuple[int, int] | None) -> bool:
    """Return whether another rank ended with a code of its own first: the signal may come of that."""
    return first is not None and first[0] != rank.rank and 0 < first[1] < 128


def _from_outside(rank: Rank) -> Reason:
    """Return the reason of a rank that a signal ended which its launcher did not pass on."""
    name = _SIGNALS[rank.signal or 15]
    summary = f"ended by {name}, and nothing in the run sent it"
    advice = "see who sent it: a person or a clean-up script of the site on that node (its log, last -x)"
    return Reason("killed", "cause", 36, summary, advice, "unknown", _tail(rank), same=name)


def _by_code(rank: Rank) -> Reason:
    code = rank.exit_code
    words = _PREFIX.sub("", rank.log.tail[-1]).strip() if rank.log.tail else ""
    last = f"its last words are: {words[:200]}" if words else "its log is empty"
    return Reason(
        cause="exit-code",
        role="cause",
        strength=30,
        summary=f"it ended with exit code {code}, and its log names no error that is known; {last}",
        advice="read the end of the rank's log; where that says nothing, look for what calls sys.exit",
        blame="code",
        lines=_tail(rank),
        same=f"code {code}",
    )


def _tail(rank: Rank) -> tuple[EvidenceLine, ...]:
    return tuple(
        EvidenceLine(rank=rank.rank, file=rank.log.file, line=None, text=text) for text in rank.log.tail[-3:]
    )
