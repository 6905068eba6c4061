"""Reads what the ranks of one attempt left behind, on the machine that holds it; prints only the findings.

Sent over stdin to ``python3 -`` with a call of :func:`answer` behind it; leaves nothing there. The findings
are one JSON document, packed (zlib, base64) into one line that starts with ``MARK``, so that what a login
shell prints around it does no harm.
"""

import base64
import contextlib
import glob
import json
import os
import pickle
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterable, Iterator, List, Optional, Pattern, Set, Tuple

MARK = "dtslurm-evidence:"
WHOLE = 64 << 20  # bytes of a log that is read in full; of a larger one, its head and its tail
HEAD, TAIL = 1 << 20, 16 << 20
MANY = 2000  # candidate lines of one file; of more, its last ones are looked at
KEPT = 3  # hits of one signature in one file: the first, and the last ones
LONGEST = 2000  # bytes of one line that are looked at
SHOWN = 400  # characters of one line that travel
LARGEST_DUMP = 32 << 20
TRACEBACK = b"Traceback (most recent call last)"
CRASH = b"(most recent call first)"
PREFIX = re.compile(rb"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$')
BOXED = re.compile(r"^\s*[│|]\s+(?P<file>[^\s:]+):(?P<line>\d+) in (?P<function>\S+)")
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|/lib64/python\d|^<frozen|^<__array")
CHAINED = {
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "context",
}
STAMP = re.compile(r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")
GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)")
DIGITS = re.compile(rb"[0-9]+")
NO_PROGRESS = re.compile(rb"(?i)error|fail|warn|nccl|frame |file \"|traceback|exception|c10d|processgroup")


class Signature:
    """One kind of line: ``words`` of which one must be in it, ``patterns`` of which one must match."""

    def __init__(self, number: int, values: Dict[str, Any]) -> None:
        self.number = number
        self.words = [word.encode() for word in values["words"]]
        self.patterns: List[Pattern[str]] = [re.compile(pattern) for pattern in values["match"]]


class Lines:
    """Lines of one file by byte offset, read as they are asked for."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115 - closed by the caller
        self.size = os.fstat(self.file.fileno()).st_size

    def around(self, start: int, count: int) -> List[bytes]:
        """Return the whole lines in ``count`` bytes from ``start``, progress bars taken apart."""
        self.file.seek(max(0, start))
        return self.file.read(count).replace(b"\r", b"\n").split(b"\n")


def answer(request: Dict[str, Any]) -> None:
    """Print the findings that a request asks for."""
    data = json.dumps(findings(request)).encode()
    sys.stdout.write("\n" + MARK + base64.b64encode(zlib.compress(data, 1)).decode() + "\n")
    sys.stdout.flush()


def findings(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return everything found of an attempt: records, hits in logs, dumps."""
    with contextlib.suppress(OSError):
        os.nice(10)
    run, attempt = request["run_dir"], str(request["attempt"])
    logs, ranks = os.path.join(run, "logs", attempt), os.path.join(run, "ranks", attempt)
    signatures = [Signature(number, values) for number, values in enumerate(request["signatures"])]
    records, firsts = rank_records(ranks)
    files = sorted(glob.glob(os.path.join(glob.escape(logs), "*.log")))
    files += [path for path in request.get("extra", []) if os.path.exists(path)]
    return {
        "schema": 1,
        "now": time.time(),
        "manifest": json_file(os.path.join(logs, "manifest.json")),
        "events": list(json_lines(os.path.join(run, "events.jsonl"))),
        "records": records,
        "first_failures": firsts,
        "files": scan(files, signatures),
        "dumps": flight_dumps(ranks, logs),
    }


# ---- Records ----


def json_file(path: str) -> Dict[str, Any]:
    """Return a JSON object, empty where there is none."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def json_lines(path: str) -> Iterator[Dict[str, Any]]:
    """Yield the objects of a JSON-lines file, leaving out what is not one."""
    try:
        with open(path, "rb") as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def rank_records(folder: str) -> Tuple[List[Dict[str, Any]], List[List[int]]]:
    """Return the ranks' records with the time the file system gave them, and who recorded a failure first."""
    records, firsts = [], []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return [], []
    for name in names:
        path = os.path.join(folder, name)
        if re.match(r"^\d+\.json$", name):
            record = json_file(path)
            if not record:
                continue
            record["written"] = os.stat(path).st_mtime
            error = json_file(path[:-5] + ".error.json").get("message")
            if error:
                record["error"] = error_record(error)
            records.append(record)
        elif name.startswith("first-failure"):
            with open(path, "rb") as file:
                words = file.read(100).split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                firsts.append([int(words[0]), int(words[1])])
    return records, firsts


def error_record(message: Any) -> Dict[str, Any]:
    """Return what torchelastic's error file tells: the message, its time, the frame of the user's code."""
    if not isinstance(message, dict):
        return {"message": str(message)[:SHOWN]}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = str(extra.get("py_callstack", "")).splitlines()
    found = {"message": str(message.get("message", ""))[:SHOWN], "time": extra.get("timestamp")}
    found["frame"] = user_frame(frames_of(stack))
    return found


# ---- Logs ----


def scan(paths: List[str], signatures: List[Signature]) -> List[Dict[str, Any]]:
    """Return what stands in the logs, file by file."""
    words = sorted({word for signature in signatures for word in signature.words} | {TRACEBACK, CRASH})
    chunks = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        candidates = pool.map(lambda chunk: candidate_lines(chunk, words), chunks)
        return [
            look(path, found.get(path, []), signatures)
            for chunk, found in zip(chunks, candidates)  # noqa: B905 - strict is new in Python 3.10
            for path in chunk
        ]


Candidate = Tuple[int, int, bytes]  # line number, byte offset of the line, the line


def candidate_lines(paths: List[str], words: List[bytes]) -> Dict[str, List[Candidate]]:
    """Return the lines that have one of the words in them; by grep, whose search for many words is fast."""
    found: Dict[str, List[Candidate]] = {}
    small = [path for path in paths if size_of(path) <= WHOLE]
    if small:
        try:
            found = by_grep(small, words)
        except OSError:
            found = {path: by_hand(path, words) for path in small}
    for path in set(paths) - set(small):
        found[path] = by_hand(path, words)
    for path in small:
        if len(found.get(path, [])) >= MANY:
            found[path] = found[path][:200] + by_hand(path, words, 0, TAIL)
    return found


def size_of(path: str) -> int:
    """Return a file's size, 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def by_grep(paths: List[str], words: List[bytes]) -> Dict[str, List[Candidate]]:
    """Return the lines with one of the words, by the program grep."""
    argv = ["grep", "-a", "-H", "-Z", "-n", "-b", "-m", str(MANY), "-F", "-f", "-", "--", *paths]
    environment = dict(os.environ, LC_ALL="C")
    grep = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    output = grep.communicate(b"\n".join(words) + b"\n")[0]
    if grep.returncode not in (0, 1, 2):
        raise OSError("grep was ended")
    found: Dict[str, List[Candidate]] = {}
    for line in output.split(b"\n"):
        name, separator, rest = line.partition(b"\0")
        if not separator:
            continue
        number, offset, text = rest.split(b":", 2)
        found.setdefault(os.fsdecode(name), []).append((int(number), int(offset), text))
    return found


def by_hand(path: str, words: List[bytes], head: int = HEAD, tail: int = TAIL) -> List[Candidate]:
    """Return the lines with one of the words in the head and the tail of a file."""
    found: List[Candidate] = []
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= head + tail:
                return lines_with(file.read(), words, 0, 1)[-MANY:]
            data = file.read(head)
            found = lines_with(data, words, 0, 1)[-MANY:]
            number = data.count(b"\n") + 1
            while file.tell() < size - tail:
                number += file.read(min(1 << 20, size - tail - file.tell())).count(b"\n")
            found += lines_with(file.read(tail), words, size - tail, number)[-MANY:]
    except OSError:
        pass
    return found


def lines_with(data: bytes, words: List[bytes], offset: int, number: int) -> List[Candidate]:
    """Return the lines of ``data`` with one of the words; it starts at ``offset`` and line ``number``."""
    starts = set()
    for word in words:
        at = data.find(word)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            after = data.find(b"\n", at)
            at = data.find(word, after) if after >= 0 else -1
    found, seen = [], 0
    for start in sorted(starts):
        number += data.count(b"\n", seen, start)
        seen = start
        end = data.find(b"\n", start)
        found.append((number, offset + start, data[start : end if end >= 0 else len(data)]))
    return found


def look(path: str, candidates: List[Candidate], signatures: List[Signature]) -> Dict[str, Any]:
    """Return the findings in one log."""
    name = os.path.basename(path)
    rank = re.match(r"^rank-(\d+)\.log$", name)
    found: Dict[str, Any] = {"file": name, "rank": int(rank.group(1)) if rank else None}
    try:
        lines = Lines(path)
    except OSError:
        return found
    with lines.file:
        status = os.fstat(lines.file.fileno())
        found.update(size=lines.size, mtime=status.st_mtime, tail=last_lines(lines))
        if candidates:
            found["hits"] = hits(candidates, signatures, lines, status.st_mtime)
            found["tracebacks"] = tracebacks(candidates, lines)
    return found


def last_lines(lines: Lines, count: int = 4) -> List[str]:
    """Return the last lines that say anything."""
    texts = [show(line) for line in lines.around(lines.size - 4096, 4096)]
    return [text for text in texts if text.strip()][-count:]


def show(line: bytes) -> str:
    """Return a line as text, cut off where it is long."""
    return line[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]


def pieces(text: bytes, words: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a line to look at: a progress bar's states that hold a word, a long line's head."""
    if b"\r" not in text:
        yield text[:LONGEST]
        return
    for part in text.split(b"\r")[-200:]:
        if any(word in part for word in words):
            yield part[:LONGEST]


def hits(
    candidates: List[Candidate], signatures: List[Signature], lines: Lines, written: float
) -> List[List[Any]]:
    """Return [signature, line number, text, groups, time, count, went on, bytes after] of what matches."""
    by_signature: Dict[int, List[Tuple[int, int, str, Dict[str, str]]]] = {}
    counts: Dict[int, int] = {}
    for number, offset, line in candidates:
        for signature in signatures:
            match = matched(signature, line)
            if match is None:
                continue
            counts[signature.number] = counts.get(signature.number, 0) + 1
            kept = by_signature.setdefault(signature.number, [])
            if len(kept) >= KEPT:
                del kept[1]
            kept.append((number, offset, match[0], match[1]))
    found = []
    for key, kept in by_signature.items():
        for number, offset, text, groups in kept:
            went_on = training_went_on(lines, offset, offset + len(text) + 1)
            after = lines.size - offset - len(text)
            found.append([key, number, text, groups, stamp(text, written), counts[key], went_on, after])
    return sorted(found, key=lambda hit: (hit[1], hit[0]))


def matched(signature: Signature, line: bytes) -> Optional[Tuple[str, Dict[str, str]]]:
    """Return the text of the line that a signature matches and its groups, None where it does not."""
    if not any(word in line for word in signature.words):
        return None
    for piece in pieces(line, signature.words):
        text = PREFIX.sub(b"", piece).decode("utf-8", "replace")
        for pattern in signature.patterns:
            match = pattern.search(text)
            if match:
                groups = {key: value.strip() for key, value in match.groupdict().items() if value}
                return text[:SHOWN], groups
    return None


def training_went_on(lines: Lines, start: int, end: int) -> bool:
    """Tell whether a log goes on after a place as before it: lines that differ in their numbers only."""
    before = {
        DIGITS.sub(b"#", line) for line in lines.around(start - 8192, min(8192, start))[1:] if line.strip()
    }
    again = 0
    seen: Dict[bytes, Set[bytes]] = {}
    for line in lines.around(end, 32768)[:-1]:
        if not line.strip() or NO_PROGRESS.search(line):
            continue
        masked = DIGITS.sub(b"#", line)
        again += masked in before
        if masked != line:
            seen.setdefault(masked, set()).add(line)
    return again >= 3 or any(len(texts) >= 5 for texts in seen.values())


def stamp(text: str, written: float) -> Optional[float]:
    """Return the time that a line carries, by this machine's time zone, None where it carries none."""
    found = STAMP.search(text)
    if found:
        values = [int(value) for value in found.groups()]
    else:
        found = GLOG.search(text)
        if not found:
            return None
        values = [time.localtime(written).tm_year, *(int(value) for value in found.groups())]
    try:
        return time.mktime((*values, 0, 0, -1))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None


# ---- Stacks ----


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
    message = [texts[place]]
    for text in texts[place + 1 : place + 6]:
        if not text.strip() or TRACEBACK.decode() in text or any(words in text for words in CHAINED):
            break
        message.append(text)
    block = {
        "line": number + place,
        "error": texts[place][:SHOWN],
        "more": "\n".join(message[1:])[:SHOWN],
        "frame": user_frame(frames),
        "frame_line": number + at + 1,
    }
    return block, place + 1


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
                    "function": found.group("function").strip()[:100],
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


# ---- Flight recorder ----


class Plain(pickle.Unpickler):
    """Reads pickled lists, dicts, numbers and texts, and refuses whatever would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function; torch's marks for typed lists are lists."""
        if module == "torch.jit._pickle" and name in {
            "build_intlist",
            "build_doublelist",
            "build_tensorlist",
        }:
            return list
        raise pickle.UnpicklingError("a flight record holds no {}.{}".format(module, name))


def flight_dumps(*folders: str) -> List[Dict[str, Any]]:
    """Return for each dump of torch's flight recorder the last collective of each process group."""
    found = []
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "flight_*"))):
            rank = re.search(r"(\d+)$", path)
            if rank and size_of(path) <= LARGEST_DUMP:
                try:
                    with open(path, "rb") as file:
                        groups = flight_groups(file)
                except Exception:  # noqa: BLE001, S112 - a torn or foreign file is no evidence
                    continue
                found.append({"rank": int(rank.group(1)), "file": os.path.basename(path), "groups": groups})
    return found


def flight_groups(file: Any) -> Dict[str, Any]:
    """Return by process group: the last number enqueued, the last completed, the first not completed."""
    start = file.read(1)
    file.seek(0)
    dump = json.loads(file.read().decode()) if start == b"{" else Plain(file).load()
    groups: Dict[str, Any] = {}
    for entry in dump.get("entries", []):
        sequence = entry.get("collective_seq_id")
        if entry.get("is_p2p") or not isinstance(sequence, int):
            continue
        group = groups.setdefault(
            str(entry.get("process_group", "")), {"enqueued": -1, "completed": -1, "stuck": None}
        )
        group["enqueued"] = max(group["enqueued"], sequence)
        by_gloo = entry.get("retired") and str(entry.get("profiling_name", "")).startswith("gloo:")
        if by_gloo or entry.get("state") == "completed":  # gloo marks what is done as retired only
            group["completed"] = max(group["completed"], sequence)
            if group["stuck"] is not None and group["stuck"]["seq"] <= sequence:
                group["stuck"] = None  # marks lag behind; a group's operations end in order
        elif sequence > group["completed"] and (group["stuck"] is None or sequence < group["stuck"]["seq"]):
            frames = entry.get("frames") or []
            own = [
                item
                for item in frames
                if isinstance(item, dict) and not LIBRARY.search(str(item.get("filename", "")))
            ]
            where = (
                "{filename}:{line}".format(**own[0]) if own and {"filename", "line"} <= set(own[0]) else ""
            )
            group["stuck"] = {
                "seq": sequence,
                "op": str(entry.get("profiling_name", ""))[:80],
                "state": str(entry.get("state", ""))[:40],
                "where": where[-200:],
            }
    return groups
