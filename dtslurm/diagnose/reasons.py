"""Find the reason why one rank ended, from its own record and log alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from dtslurm.diagnose.findings import Block, Findings, Hit, LogEvidence, Rank, Traceback, TraceFrame
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import EvidenceLine, Signature
from dtslurm.model.values import dataclass

EXCEPTION = 70  # strength of an uncaught Python exception that matches no signature
WEAK = 45  # a weaker cause counts only without a timeout, a lost peer or a termination signal
_SIMILAR_STRENGTH = 20  # among reasons whose strengths differ by at most this, the first in the log counts
_TRANSIENT = re.compile(
    r"\b(WARN(ING)?|INFO|DEBUG|retry(ing)?|fall(ing)? ?back|ignor(ed|ing)|skip(ped|ping)|attempt \d+)\b",
    re.IGNORECASE,
)
_FINAL = re.compile(r"NCCL WARN|stop|abort|exit|terminat", re.IGNORECASE)
_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 15: "SIGTERM", 24: "SIGXCPU", 31: "SIGSYS",
}  # fmt: skip
TERMINATION_SIGNALS = {1, 2, 10, 12, 15}
# Causes known only from Python exceptions, which a program may have caught and logged before it continued.
EXCEPTION_CAUSES = {"python-exception", "import-error", "nan-loss"}
_PYTHON_ERRORS = {"python-exception", "import-error"}
_CRASH_CAUSES = {"abort", "segfault", "bus-error"}
_MAX_UNCAUGHT_REDUCTION = 20  # the most that an uncaught exception's strength is reduced by
_SLURM_MESSAGE = 40  # from this strength on, a line is Slurm's own message on what ended a rank
# Strength of an exception that cannot have ended the process: weaker than the exit code or signal itself.
_CAUGHT_STRENGTH = 25
_RANK_PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
_COMPARED_CHARS = 300  # characters that are compared, since logged lines may be cut off

Kind = Literal["cause", "weak", "timeout", "lost-peer", "ended", "fine", "silent"]


@dataclass(frozen=True)
class Reason:
    """A possible reason why a rank ended.

    Attributes:
        strength: 0 to 100, how surely the reason alone explains the end.
        time: seconds since the epoch by the node's clock, if the line has a time.
        same: a key that reasons of the same kind on other ranks share.
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
    """How a rank ended: with a cause of its own, as a consequence of other ranks, or unknown."""

    rank: Rank
    kind: Kind
    reason: Reason | None = None


class Classifier:
    """Classifies the ends of ranks by signatures of known errors."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._signatures = {signature.name: signature for signature in signatures}
        self._patterns = {
            signature.name: [re.compile(pattern) for pattern in signature.match]
            for signature in self._signatures.values()
        }

    def end_of(self, rank: Rank, first_exit: tuple[int, int] | None = None) -> RankEnd:
        """Return how a rank ended.

        Args:
            rank: the evidence on the rank.
            first_exit: (rank, exit code) of the rank whose end was recorded first, if known.
        """
        causes = list(self._find_causes(rank, first_exit is not None and first_exit[0] == rank.rank))
        best = _first_of_strongest(causes)
        peer_reason = _strongest(self._peer_reasons(rank.log))
        if rank.exit_code in (0, WANTS_REQUEUE):
            return RankEnd(rank, "fine")
        if best is not None and best.strength >= WEAK:
            return RankEnd(rank, "cause", best)
        if peer_reason is not None:
            kind: Kind = "timeout" if peer_reason.role == "timeout" else "lost-peer"
            return RankEnd(rank, kind, peer_reason)
        ended_reason = self._find_ended_reason(rank.log)
        was_signalled_directly = (
            rank.signal in TERMINATION_SIGNALS
            and not rank.told_to_end
            and not _failed_before(rank, first_exit)
        )
        if was_signalled_directly and (ended_reason is None or ended_reason.strength < _SLURM_MESSAGE):
            return RankEnd(rank, "weak", _reason_from_external_signal(rank))
        if rank.signal in TERMINATION_SIGNALS or ended_reason is not None:
            return RankEnd(rank, "ended", ended_reason)
        if rank.exit_code is None:
            return RankEnd(rank, "silent")
        exit_code_reason = _reason_from_exit_code(rank)
        return RankEnd(
            rank,
            "weak",
            best if best is not None and best.strength > exit_code_reason.strength else exit_code_reason,
        )

    def find_job_reasons(self, findings: Findings) -> list[tuple[LogEvidence, Reason]]:
        """Return the causes in the logs of launchers and the batch script, the strongest first."""
        reasons = [
            (log, reason)
            for log in findings.job_logs
            for reason in self._reasons_in_log(log, None)
            if reason.role in ("cause", "ended", "timeout", "lost-peer")
        ]
        return sorted(reasons, key=lambda item: -item[1].strength)

    def _find_causes(self, rank: Rank, ended_first: bool) -> Iterator[Reason]:
        for log_reason in self._reasons_in_log(rank.log, rank.rank, rank.exit_code):
            if log_reason.role == "cause":
                is_caught = _is_ruled_out(log_reason, rank, ended_first)
                yield (
                    replace(log_reason, strength=min(log_reason.strength, _CAUGHT_STRENGTH))
                    if is_caught
                    else log_reason
                )
        if rank.error:
            line = EvidenceLine(rank=rank.rank, file=f"{rank.rank}.error.json", line=None, text=rank.error)
            reason = self._reason_from_text(rank.error, rank.rank, rank.error_frame, (line,))
            if reason.role == "cause":
                yield reason
        yield from _reasons_from_signal(rank)

    def _peer_reasons(self, log: LogEvidence) -> list[Reason]:
        return [
            reason
            for reason in self._reasons_in_log(log, log.rank)
            if reason.role in ("timeout", "lost-peer") and reason.strength > 0
        ]

    def _find_ended_reason(self, log: LogEvidence) -> Reason | None:
        return _strongest(
            [reason for reason in self._reasons_in_log(log, log.rank) if reason.role == "ended"]
        )

    def _reasons_in_log(
        self, log: LogEvidence, rank: int | None, code: int | None = None
    ) -> Iterator[Reason]:
        traceback_lines: set[int] = set()
        chains = [
            (traceback, self._reason_from_chain(traceback, log.file, rank))
            for traceback in log.tracebacks
            if traceback.blocks and not traceback.ignored
        ]
        uncaught = _find_uncaught([reason for _, reason in chains])
        for chain in log.tracebacks:
            traceback_lines.update(
                range(chain.line, max((block.line for block in chain.blocks), default=chain.line) + 1)
            )
        for chain, reason in chains:
            reduction = _strength_reduction(chain.went_on, chain.after)
            if code == 1 and reason is uncaught and chain.blocks[-1].top == "<module>":
                # The main script ended; other threads and child processes may still write to the log.
                reduction = min(reduction, _MAX_UNCAUGHT_REDUCTION)
            total_reduction = (30 if reason.role == "cause" and reason is not uncaught else 0) + reduction
            yield replace(reason, strength=max(0, reason.strength - total_reduction))
        for hit in log.hits:
            if hit.line not in traceback_lines:
                yield self._reason_from_hit(hit, log, rank)

    def _reason_from_hit(self, hit: Hit, log: LogEvidence, rank: int | None) -> Reason:
        signature = self._signatures[hit.signature]
        reduction = 0
        if not signature.lasting:
            reduction = _strength_reduction(hit.went_on, hit.after)
            if _TRANSIENT.search(hit.text) and not _FINAL.search(hit.text):
                reduction = max(reduction, 40)
        lines = (EvidenceLine(rank=rank, file=log.file, line=hit.line, text=hit.text),)
        reason = _reason_from_signature(signature, hit.groups, lines)
        if reason.cause in ("segfault", "bus-error"):
            reason = _add_crash_stack(reason, log, rank)
        return replace(reason, strength=max(0, signature.strength - reduction), time=hit.time)

    def _reason_from_chain(self, chain: Traceback, file: str, rank: int | None) -> Reason:
        """Return the strongest reason of a chain of exceptions.

        Among equals it is the first exception of a cause chain, otherwise the last. An exception during whose
        handling another one was raised was caught: it does not count, unless a signature recognizes it.
        """
        best: Reason | None = None
        chosen_block = chain.blocks[0]
        for block in chain.blocks:
            reason = self._reason_from_block(block, file, rank)
            is_later = block.link != "cause"
            replaces_handled = block.link == "context" and reason.role == "cause"
            if (
                best is None
                or reason.strength > best.strength
                or (is_later and reason.strength == best.strength)
                or (replaces_handled and best.cause in EXCEPTION_CAUSES)
            ):
                best, chosen_block = reason, block
        assert best is not None  # noqa: S101 - every chain here has blocks
        return _add_handled_exception(best, chosen_block, chain, file, rank)

    def _reason_from_block(self, block: Block, file: str, rank: int | None) -> Reason:
        lines: list[EvidenceLine] = []
        if block.frame:
            frame = block.frame
            lines.append(
                EvidenceLine(
                    rank=rank, file=file, line=block.frame_line + frame.offset, text=_format_frame(frame)
                )
            )
        lines.append(EvidenceLine(rank=rank, file=file, line=block.line, text=block.error))
        lines += _message_lines(block, file, rank)
        return self._reason_from_text(f"{block.error}\n{block.more}", rank, block.frame, tuple(lines))

    def _reason_from_text(
        self, text: str, rank: int | None, frame: TraceFrame | None, lines: tuple[EvidenceLine, ...]
    ) -> Reason:
        """Return the reason that an exception's type and message give."""
        first_line = text.split("\n", 1)[0]
        match = self._find_signature(first_line)
        if match is None and (text_match := self._find_signature(text)) is not None:
            # A crash is in the output after the exception, not in its message.
            match = text_match if text_match[0].cause not in _CRASH_CAUSES else None
        if match is not None and not (rank is not None and _runs_a_command(match[1], frame)):
            reason = _reason_from_signature(match[0], match[1], lines)
            location = f", at {frame.file}:{frame.line}" if frame and match[0].role == "cause" else ""
            return replace(reason, summary=reason.summary + location)
        location = f" at {frame.file}:{frame.line} in {frame.function}" if frame else ""
        return Reason(
            cause="python-exception",
            role="cause",
            strength=EXCEPTION,
            summary=f"{first_line.strip()}{location}",
            advice="check this line of the code; the log of the rank has the complete stack",
            blame="code",
            lines=lines,
            groups={"type": first_line.split(":", 1)[0]},
            same=_mask_numbers(first_line),
        )

    def _find_signature(self, text: str) -> tuple[Signature, dict[str, str]] | None:
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
    """Return a message's indented lines; lines without indentation may be other output."""
    lines = []
    for number, text in enumerate(block.more.split("\n"), block.line + 1):
        if not text.startswith((" ", "\t")):
            break
        lines.append(EvidenceLine(rank=rank, file=file, line=number, text=text.replace("\t", "    ")))
    return lines


def _add_handled_exception(
    reason: Reason, chosen_block: Block, chain: Traceback, file: str, rank: int | None
) -> Reason:
    """Return a plain exception's reason, with the exception added during whose handling it was raised."""
    handled_block = (
        chain.blocks[chain.blocks.index(chosen_block) - 1] if chosen_block is not chain.blocks[0] else None
    )
    if handled_block is None or chosen_block.link != "context" or reason.cause not in EXCEPTION_CAUSES:
        return reason
    location = f" at {handled_block.frame.file}:{handled_block.frame.line}" if handled_block.frame else ""
    line = EvidenceLine(rank=rank, file=file, line=handled_block.line, text=handled_block.error)
    summary = f"{reason.summary}; raised while {handled_block.error.strip()}{location} was handled"
    return replace(reason, summary=summary, lines=(line, *reason.lines))


def _runs_a_command(groups: Mapping[str, str], frame: TraceFrame | None) -> bool:
    """Return whether the user's own code, not a launcher, ran a command that failed."""
    return (
        "command" in groups
        and frame is not None
        and frame.file.endswith(".py")
        and "-packages/" not in frame.file
    )


def _is_ruled_out(reason: Reason, rank: Rank, ended_first: bool) -> bool:
    """Return whether an exception cannot have ended the rank.

    No exception ends a process with the rank's exit code or signal. An exception at the end of the log may
    still have ended it: Python crashed while it exited, the program chose the exit code, or the rank
    hung afterwards and was killed. The last is impossible if no other rank failed before.
    """
    line = reason.lines[-1].line if reason.lines else None
    chain = next((traceback for traceback in rank.log.tracebacks if traceback.blocks and line is not None and
                  traceback.line <= line <= max(block.line for block in traceback.blocks)), None)  # fmt: skip
    signal = signal_of(rank)
    if signal in (7, 9, 11):
        is_python_error = reason.cause in (EXCEPTION_CAUSES if chain else _PYTHON_ERRORS)
        return is_python_error and (
            (signal == 9 and ended_first) or not _ends_with(rank.log.tail, reason, chain)
        )
    if signal is not None or rank.exit_code in (None, 1) or chain is None:
        return False
    return reason.cause in EXCEPTION_CAUSES and not _ends_with(rank.log.tail[-1:], reason, chain)


def _ends_with(tail: Sequence[str], reason: Reason, chain: Traceback | None) -> bool:
    expected_lines = [line.text for line in reason.lines]
    if chain is not None:
        # Lines without indentation may be other output of the log.
        more_lines = chain.blocks[-1].more.split("\n")
        expected_lines = [
            chain.blocks[-1].error,
            *(text for text in more_lines if text.startswith((" ", "\t"))),
        ]
    last_lines = {_RANK_PREFIX.sub("", line)[:_COMPARED_CHARS] for line in tail}
    return not last_lines or any(text and text[:_COMPARED_CHARS] in last_lines for text in expected_lines)


def _find_uncaught(reasons: list[Reason]) -> Reason | None:
    """Return the reason of the last traceback that is the rank's own fault: earlier ones were caught."""
    causes = [reason for reason in reasons if reason.role == "cause"]
    candidates = causes or reasons
    return candidates[-1] if candidates else None


def _strength_reduction(has_continued: bool, bytes_after: int) -> int:
    """Return by how much a line's strength is reduced because of the output after it."""
    if has_continued:
        return 60
    if bytes_after > 1 << 20:
        return 45
    return 25 if bytes_after > 1 << 16 else 0


def _first_of_strongest(reasons: list[Reason]) -> Reason | None:
    """Return the reason that is first in the log, of those that are about as strong as the strongest."""
    if not reasons:
        return None
    max_strength = max(reason.strength for reason in reasons)
    candidates = [
        reason
        for reason in reasons
        if reason.strength >= max_strength - _SIMILAR_STRENGTH and reason.strength >= min(WEAK, max_strength)
    ]
    return min(candidates, key=_sort_key_by_line)


def _sort_key_by_line(reason: Reason) -> tuple[int, int]:
    line = reason.lines[0].line if reason.lines else None
    return (line if line is not None else 1 << 60, -reason.strength)


def _strongest(reasons: list[Reason]) -> Reason | None:
    return max(reasons, key=lambda reason: reason.strength, default=None)


def _reason_from_signature(
    signature: Signature, groups: Mapping[str, str], lines: tuple[EvidenceLine, ...]
) -> Reason:
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
    """Insert ``{group}`` values; a part in ``[[ ]]`` is removed if one of its groups is missing."""

    def keep_if_complete(match: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)\}", match[1])
        return match[1] if all(groups.get(name) for name in names) else ""

    kept_text = re.sub(r"\[\[(.*?)\]\]", keep_if_complete, sentence)
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1]) or "?", kept_text).strip()


def _add_crash_stack(reason: Reason, log: LogEvidence, rank: int | None) -> Reason:
    for chain in log.tracebacks:
        if chain.crash:
            line = EvidenceLine(rank=rank, file=log.file, line=chain.line, text=_format_frame(chain.crash))
            location = f", at {chain.crash.file}:{chain.crash.line} in {chain.crash.function}"
            return replace(reason, lines=(*reason.lines, line), summary=reason.summary + location)
    return reason


def _format_frame(frame: TraceFrame) -> str:
    code = f": {frame.code}" if frame.code else ""
    return f'File "{frame.file}", line {frame.line}, in {frame.function}{code}'


def _mask_numbers(text: str) -> str:
    """Return a text that is equal for messages that differ only in numbers, such as ranks and addresses."""
    return re.sub(r"\d+", "#", text)[:200]


def signal_of(rank: Rank) -> int | None:
    """Return the signal that ended a rank, or None. A number outside of 1 to 64 is not a signal."""
    return rank.signal if rank.signal is not None and 0 < rank.signal <= 64 else None


def _reasons_from_signal(rank: Rank) -> Iterator[Reason]:
    signal = signal_of(rank)
    if signal is None or signal in TERMINATION_SIGNALS:
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
        summary = (
            "the process accessed memory that does not exist (SIGBUS); the usual cause is a full /dev/shm"
        )
        advice = "check df -h /dev/shm on that node; use fewer data-loader workers or a larger /dev/shm"
    elif signal == 9:
        cause, strength, blame = "killed", 40, "unknown"
        summary = (
            "killed by SIGKILL without a cause in the log: by the kernel because memory ran out, or "
            "by a person"
        )
        advice = (
            "check the memory use (sacct -j JOB -o MaxRSS,ReqMem); request more with --mem if it was "
            "close to the limit"
        )
    else:
        cause, strength, blame = "abort" if signal == 6 else "killed", 38, "code"
        summary, advice = f"ended by {name} without a cause in the log", "read the end of the log"
    yield Reason(cause, "cause", strength, summary, advice, blame, _tail_lines(rank), same=f"signal {signal}")


def _failed_before(rank: Rank, first_exit: tuple[int, int] | None) -> bool:
    """Return whether another rank failed with an exit code first, which may have caused the signal."""
    return first_exit is not None and first_exit[0] != rank.rank and 0 < first_exit[1] < 128


def _reason_from_external_signal(rank: Rank) -> Reason:
    """Return the reason of a rank that was ended by a signal which its launcher did not send."""
    name = _SIGNALS[rank.signal or 15]
    summary = f"ended by {name}, which no part of the run sent"
    advice = "find the sender: a person or a clean-up script of the cluster on that node (its log, last -x)"
    return Reason("killed", "cause", 36, summary, advice, "unknown", _tail_lines(rank), same=name)


def _reason_from_exit_code(rank: Rank) -> Reason:
    code = rank.exit_code
    last_line = _RANK_PREFIX.sub("", rank.log.tail[-1]).strip() if rank.log.tail else ""
    last_output = f"its last output is: {last_line[:200]}" if last_line else "its log is empty"
    return Reason(
        cause="exit-code",
        role="cause",
        strength=30,
        summary=f"it ended with exit code {code}, and its log contains no known error; {last_output}",
        advice="read the end of the rank's log; if it shows no cause, find the code that calls sys.exit",
        blame="code",
        lines=_tail_lines(rank),
        same=f"code {code}",
    )


def _tail_lines(rank: Rank) -> tuple[EvidenceLine, ...]:
    return tuple(
        EvidenceLine(rank=rank.rank, file=rank.log.file, line=None, text=text) for text in rank.log.tail[-3:]
    )
