"""Python stacks in a log: chains of exceptions, and the innermost frame of the user's own code."""

import re
from typing import Any, Dict, List, Optional, Tuple

from .lines import PREFIX, SHOWN, Candidate, Lines, training_went_on

LONGEST = 2000  # bytes of one line that are searched
MESSAGE = 12  # lines of an exception's message that are read
TRACEBACK = b"Traceback (most recent call last)"
CRASH = b"(most recent call first)"
# The frame of a SyntaxError's own line has no function.
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(,? in (?P<function>.+))?$')
BOXED = re.compile(r"^\s*[│|]\s+(?P<file>[^\s:]+):(?P<line>\d+) in (?P<function>\S+)")
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|/lib64/python\d|^<frozen|^<__array")
CHAINED = {
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "context",
}


def tracebacks(candidates: List[Candidate], lines: Lines) -> List[Dict[str, Any]]:
    """Return the last chains of exceptions in a log, and the stack of a crash."""
    starts = [(number, offset) for number, offset, text in candidates if TRACEBACK in text]
    chains: List[Dict[str, Any]] = []
    covered_to = -1
    for number, offset in starts[-12:]:
        if offset < covered_to:
            continue
        chain, length = chain_at(lines, number, offset)
        covered_to = offset + length
        if chain["blocks"]:
            chain["went_on"] = training_went_on(lines, offset, covered_to)
            chain["after"] = lines.size - covered_to
            chains.append(chain)
    crash_starts = [(number, offset) for number, offset, text in candidates if CRASH in text]
    for number, offset in crash_starts[-1:]:
        stack = [PREFIX.sub(b"", line).decode("utf-8", "replace") for line in lines.around(offset, 8192)[1:]]
        frames = frames_of(stack)[::-1]
        if frames:
            chains.append({"line": number, "crash": user_frame(frames), "blocks": [], "after": 0})
    return chains[-4:]


def chain_at(lines: Lines, number: int, offset: int) -> Tuple[Dict[str, Any], int]:
    """Return the chain of exceptions that starts at a traceback, and its length in bytes."""
    raw_lines = lines.around(offset, 65536)
    texts = [PREFIX.sub(b"", line[:LONGEST]).decode("utf-8", "replace") for line in raw_lines]
    ignored = False
    if offset:
        lines_above = [line for line in lines.around(offset - 400, min(400, offset)) if line.strip()]
        ignored = bool(lines_above) and bool(
            re.search(rb"Exception ignored|Error in (atexit|sys\.)", lines_above[-1])
        )
    blocks: List[Dict[str, Any]] = []
    position, end_position, link = 0, 0, ""
    while position < len(texts):
        block, position = block_at(texts, position, number)
        if block is None:
            break
        block["link"] = link
        blocks.append(block)
        end_position = position
        position, link = next_link(texts, position)
        if not link:
            break
    length = sum(len(line) + 1 for line in raw_lines[:end_position])
    return {"line": number, "blocks": blocks[:2] + blocks[2:][-3:], "ignored": ignored}, length


def next_link(texts: List[str], at: int) -> Tuple[int, str]:
    """Return where the next traceback of a chain starts and how it is linked; no link at the chain's end."""
    link = ""
    for index in range(at, min(at + 40, len(texts))):
        for message, kind in CHAINED.items():
            if message in texts[index]:
                link = kind
        if TRACEBACK.decode() in texts[index]:
            if texts[index].startswith("Original "):
                link = "original"
            return index, link
    return at, ""


def block_at(texts: List[str], at: int, number: int) -> Tuple[Optional[Dict[str, Any]], int]:
    """Return one traceback, with its exception and the innermost frame of the user's own code, and its end.

    The traceback is None if the lines end before the exception.
    """
    boxed = "─" in texts[at]
    index = at + 1
    while index < len(texts):
        text = texts[index]
        is_inside = text.startswith((" ", "\t", "│", "|", "╰", "╭")) or not text.strip()
        if not is_inside:
            break
        index += 1
    if index >= len(texts) or not re.match(
        r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|\w)*(:|$)", texts[index]
    ):
        return None, index
    frames = frames_of(texts[at + 1 : index], boxed)
    block = {
        "line": number + index,
        "error": texts[index][:SHOWN],
        "more": "\n".join(below(texts[index + 1 :])),
        "frame": user_frame(frames),
        "top": frames[0]["function"] if frames else "",
        "frame_line": number + at + 1,
    }
    return block, index + 1


def below(texts: List[str]) -> List[str]:
    """Return the lines of a message after its first: indented lines, and up to five others."""
    message_lines: List[str] = []
    for text in texts[:MESSAGE]:
        if not text.strip() or TRACEBACK.decode() in text or any(phrase in text for phrase in CHAINED):
            break
        if len(message_lines) >= 5 and not text.startswith((" ", "\t")):
            break
        message_lines.append(text[:SHOWN])
    return message_lines


def frames_of(texts: List[str], boxed: bool = False) -> List[Dict[str, Any]]:
    """Return the frames in the lines of a traceback, in their order."""
    frames = []
    for index, text in enumerate(texts):
        match = (BOXED if boxed else FRAME).match(text)
        if match:
            code = texts[index + 1].strip() if index + 1 < len(texts) and not boxed else ""
            frames.append(
                {
                    "file": match.group("file")[-200:],
                    "line": int(match.group("line")),
                    "function": (match.group("function") or "<module>").strip()[:100],
                    "code": "" if FRAME.match(code) else code[:160],
                    "offset": index,
                }
            )
    return frames


def user_frame(frames: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return the innermost frame outside libraries, or the innermost frame if all are in libraries."""
    user_frames = [frame for frame in frames if not LIBRARY.search(frame["file"])]
    frames = user_frames or frames
    return frames[-1] if frames else None
