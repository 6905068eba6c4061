"""Python's stacks in a log: the chains of exceptions, and the innermost frame of the user's own code."""

import re
from typing import Any, Dict, List, Optional, Tuple

from .lines import PREFIX, SHOWN, Candidate, Lines, training_went_on

LONGEST = 2000  # bytes of one line that are looked at
MESSAGE = 12  # lines of one message
TRACEBACK = b"Traceback (most recent call last)"
CRASH = b"(most recent call first)"
# A SyntaxError's own line has no function.
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(,? in (?P<function>.+))?$')
BOXED = re.compile(r"^\s*[│|]\s+(?P<file>[^\s:]+):(?P<line>\d+) in (?P<function>\S+)")
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|/lib64/python\d|^<frozen|^<__array")
CHAINED = {
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "context",
}


def tracebacks(candidates: List[Candidate], lines: Lines) -> List[Dict[str, Any]]:
    """Return the last chains of exceptions in a log, and the stack of a crash."""
    places = [(number, offset) for number, offset, text in candidates if TRACEBACK in text]
    chains: List[Dict[str, Any]] = []
    covered = -1
    for number, offset in places[-12:]:
        if offset < covered:
            continue
        chain, length = chain_at(lines, number, offset)
        covered = offset + length
        if chain["blocks"]:
            chain["went_on"] = training_went_on(lines, offset, covered)
            chain["after"] = lines.size - covered
            chains.append(chain)
    crashes = [(number, offset) for number, offset, text in candidates if CRASH in text]
    for number, offset in crashes[-1:]:
        stack = [PREFIX.sub(b"", line).decode("utf-8", "replace") for line in lines.around(offset, 8192)[1:]]
        frames = frames_of(stack)[::-1]
        if frames:
            chains.append({"line": number, "crash": user_frame(frames), "blocks": [], "after": 0})
    return chains[-4:]


def chain_at(lines: Lines, number: int, offset: int) -> Tuple[Dict[str, Any], int]:
    """Return the exceptions chained from a traceback on, and how many bytes they take."""
    raw = lines.around(offset, 65536)
    texts = [PREFIX.sub(b"", line[:LONGEST]).decode("utf-8", "replace") for line in raw]
    ignored = False
    if offset:
        above = [line for line in lines.around(offset - 400, min(400, offset)) if line.strip()]
        ignored = bool(above) and bool(re.search(rb"Exception ignored|Error in (atexit|sys\.)", above[-1]))
    blocks: List[Dict[str, Any]] = []
    at, end, link = 0, 0, ""
    while at < len(texts):
        block, at = block_at(texts, at, number)
        if block is None:
            break
        block["link"] = link
        blocks.append(block)
        end = at
        at, link = next_link(texts, at)
        if not link:
            break
    length = sum(len(line) + 1 for line in raw[:end])
    return {"line": number, "blocks": blocks[:2] + blocks[2:][-3:], "ignored": ignored}, length


def next_link(texts: List[str], at: int) -> Tuple[int, str]:
    """Return where the next traceback of a chain starts and how it hangs together; no word at the end."""
    link = ""
    for place in range(at, min(at + 40, len(texts))):
        for words, name in CHAINED.items():
            if words in texts[place]:
                link = name
        if TRACEBACK.decode() in texts[place]:
            if texts[place].startswith("Original "):
                link = "original"
            return place, link
    return at, ""


def block_at(texts: List[str], at: int, number: int) -> Tuple[Optional[Dict[str, Any]], int]:
    """Return one traceback: its exception and the innermost frame of the user's own code; and its end."""
    boxed = "─" in texts[at]
    place = at + 1
    while place < len(texts):
        text = texts[place]
        inside = text.startswith((" ", "\t", "│", "|", "╰", "╭")) or not text.strip()
        if not inside:
            break
        place += 1
    if place >= len(texts) or not re.match(
        r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|\w)*(:|$)", texts[place]
    ):
        return None, place
    frames = frames_of(texts[at + 1 : place], boxed)
    block = {
        "line": number + place,
        "error": texts[place][:SHOWN],
        "more": "\n".join(below(texts[place + 1 :])),
        "frame": user_frame(frames),
        "top": frames[0]["function"] if frames else "",
        "frame_line": number + at + 1,
    }
    return block, place + 1


def below(texts: List[str]) -> List[str]:
    """Return the lines of a message after its first: those that are indented, and up to five that are not."""
    found: List[str] = []
    for text in texts[:MESSAGE]:
        if not text.strip() or TRACEBACK.decode() in text or any(words in text for words in CHAINED):
            break
        if len(found) >= 5 and not text.startswith((" ", "\t")):
            break
        found.append(text[:SHOWN])
    return found


def frames_of(texts: List[str], boxed: bool = False) -> List[Dict[str, Any]]:
    """Return the frames in lines of a traceback, in their order."""
    frames = []
    for place, text in enumerate(texts):
        found = (BOXED if boxed else FRAME).match(text)
        if found:
            code = texts[place + 1].strip() if place + 1 < len(texts) and not boxed else ""
            frames.append(
                {
                    "file": found.group("file")[-200:],
                    "line": int(found.group("line")),
                    "function": (found.group("function") or "<module>").strip()[:100],
                    "code": "" if FRAME.match(code) else code[:160],
                    "offset": place,
                }
            )
    return frames


def user_frame(frames: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return the innermost frame that is not in a library, the innermost of all where all are."""
    own = [frame for frame in frames if not LIBRARY.search(frame["file"])]
    frames = own or frames
    return frames[-1] if frames else None
