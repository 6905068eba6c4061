"""The register of a run's artifacts: ``artifacts.jsonl`` in the run directory, one object per line.

Training code may add a line of its own, ``{"path": ..., "step": ..., "metrics": {...}}``; lines of one path
add up, and the last word holds. Paths are below the run directory or full ones. `answer` lists, pins, checks
and prunes where the files lie. Stdlib only, Python >= 3.6.
"""

import errno
import glob
import hashlib
import json
import math
import os
import shutil
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

FILE = "artifacts.jsonl"
PINS = "pins.json"
CHUNK = 1 << 22
BUDGET_S = 60.0  # at a job's end, for checksums; later ones are made when they are asked for
CLOCKS_S = 60.0  # by which a node's clock and that of its file server may differ


class Late(Exception):
    """There is no time left for a checksum."""


def add(run_dir: str, **values: Any) -> None:
    """Append one line, in one write."""
    record = {"schema": 1, "time": round(time.time(), 3)}
    record.update(values)
    descriptor = os.open(os.path.join(run_dir, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(record).encode() + b"\n")
    finally:
        os.close(descriptor)


def lines(run_dir: str) -> Iterator[Dict[str, Any]]:
    """Yield the lines that are objects with a path."""
    try:
        with open(os.path.join(run_dir, FILE), "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return
    for line in text.split("\n"):  # not at every line end of Unicode: they may stand in a path
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("path"), str) and value["path"]:
            yield value


def relative(run_dir: str, path: str) -> str:
    """Return a path as the register has it."""
    full = os.path.normpath(os.path.join(run_dir, path))
    inside = full.startswith(os.path.normpath(run_dir) + "/")
    return os.path.relpath(full, run_dir) if inside else full


def known(run_dir: str) -> Dict[str, Dict[str, Any]]:
    """Return each artifact by its path, in the order of their first lines."""
    found: Dict[str, Dict[str, Any]] = {}
    for one in lines(run_dir):
        path = relative(run_dir, one["path"])
        entry = found.setdefault(path, {"metrics": {}})
        metrics = one.get("metrics")
        if isinstance(metrics, dict):
            entry["metrics"].update(metrics)
        if one.get("bytes") is not None or one.get("step", entry.get("step")) != entry.get("step"):
            entry.pop("sha256", None)  # it was of the file before
        entry.update({key: value for key, value in one.items() if key not in ("metrics", "schema")})
        entry["path"] = path
    return found


def pins(run_dir: str) -> List[str]:
    """Return the paths that must be kept.

    Raises:
        OSError: it cannot be told which these are.
    """
    path = os.path.join(run_dir, PINS)
    try:
        with open(path) as file:
            return [str(one) for one in json.load(file)["pinned"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise OSError(errno.EINVAL, "it is damaged: mend it, or remove it to pin anew", path) from None


def files_of(path: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield a file, or the files below a folder, each with what the file system tells of it."""
    if os.path.isfile(path):
        yield path, os.stat(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            try:
                yield full, os.stat(full)
            except OSError:
                continue


def measure(path: str, checksum: bool, end: float = math.inf) -> Dict[str, Any]:
    """Return a file's or folder's ``bytes`` and ``files``, and its ``sha256`` if asked for.

    A folder's is the SHA-256 of the lines ``<sha256 of the file>  <path>`` of its files, sorted by path.

    Raises:
        Late: there is no checksum by ``end``, on the monotonic clock.
    """
    size, count, sums = 0, 0, []
    for full, found in files_of(path):
        size, count = size + found.st_size, count + 1
        if checksum:
            sums.append((os.path.relpath(full, path), digest_of(full, end)))
    told: Dict[str, Any] = {"bytes": size, "files": count}
    if checksum and os.path.isfile(path):
        told["sha256"] = sums[0][1]
    elif checksum:
        text = "".join("{}  {}\n".format(digest, name) for name, digest in sorted(sums))
        told["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return told


def digest_of(path: str, end: float = math.inf) -> str:
    """Return a file's SHA-256.

    Raises:
        Late: it takes beyond ``end``, on the monotonic clock.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            if time.monotonic() > end:
                raise Late
            digest.update(chunk)
    return digest.hexdigest()


def collect(run_dir: str, patterns: List[str]) -> None:
    """Register what matches the patterns (of paths below the run directory, or full ones) and is new."""
    end = time.monotonic() + BUDGET_S
    told_attempt = os.environ.get("DTSLURM_ATTEMPT", "")
    attempt = int(told_attempt) if told_attempt.isdigit() else 0
    have = known(run_dir)
    found = []
    for pattern in patterns:
        base = glob.escape(run_dir) if not pattern.startswith("/") else ""
        found += sorted(glob.glob(os.path.join(base, pattern), recursive=True))
    for path in dict.fromkeys([*found, *(os.path.join(run_dir, one) for one in have)]):
        name = relative(run_dir, path)
        before = have.get(name, {})
        if not os.path.exists(path) or is_registered(path, before, attempt) or name.startswith(FILE):
            continue
        try:
            told = _measured(path, end)
        except OSError:
            continue
        values = {"path": name, "kind": before.get("kind", "output"), "attempt": attempt}
        add(run_dir, **dict(told, **values))


def is_registered(path: str, entry: Dict[str, Any], attempt: int) -> bool:
    """Whether the register has a checksum of what lies there, and not of what an earlier attempt wrote."""
    if not entry.get("sha256"):
        return False
    if entry.get("kind", "output") != "output" or entry.get("attempt") == attempt:
        return True  # what is no output is written once, and registered by who does
    written = max([found.st_mtime for _, found in files_of(path)] or [0.0])
    return written < (_number(entry.get("time")) or 0.0) - CLOCKS_S


def _measured(path: str, end: float) -> Dict[str, Any]:
    """Return what `measure` does, without a checksum where there is no time for it."""
    try:
        return measure(path, time.monotonic() < end, end)
    except Late:
        return measure(path, False)


def register_results(run_dir: str, folder: str) -> None:
    """Register what came back from local disks: one artifact for each node."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith("node-") or not name.endswith(".json"):
            continue
        with open(os.path.join(folder, name)) as file:
            record = json.load(file)
        if not record.get("final") or not record.get("complete"):
            continue
        rows = sorted(record["files"].items())
        text = "".join("{}  {}\n".format(one["sha256"], path) for path, one in rows)
        add(
            run_dir, path=relative(run_dir, os.path.join(folder, name[:-5])), kind="results",
            bytes=sum(one["bytes"] for _, one in rows), files=len(rows), node=record.get("node"),
            sha256=hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest(),
        )  # fmt: skip


# ---- where the run lies, for the command line ----


def listing(run_dir: str, checksums: List[str]) -> List[Dict[str, Any]]:
    """Return all artifacts as they are now: what each line told, ``there``, ``pinned``, sizes looked at.

    Args:
        checksums: paths of those whose checksum is to be made now; ``now_sha256`` has it.
    """
    pinned = set(pins(run_dir))
    rows = []
    for path, entry in known(run_dir).items():
        full = os.path.join(run_dir, path)
        row = dict(entry, path=path, there=os.path.exists(full), pinned=path in pinned)
        if row["there"]:
            told = measure(full, path in checksums)
            row["now_bytes"] = told["bytes"]
            row.setdefault("files", told["files"])
            if "sha256" in told:
                row["now_sha256"] = told["sha256"]
        row.setdefault("kind", "output")
        rows.append(row)
    return rows


def pin(run_dir: str, paths: List[str], keep: bool) -> List[str]:
    """Pin artifacts, or let them go; return all that are pinned now."""
    now = set(pins(run_dir))
    now = now | set(paths) if keep else now - set(paths)
    draft = os.path.join(run_dir, ".{}.{}".format(PINS, os.getpid()))
    with open(draft, "w") as file:
        json.dump({"schema": 1, "pinned": sorted(now)}, file)
        file.write("\n")
    os.replace(draft, os.path.join(run_dir, PINS))
    return sorted(now)


def outdated(rows: List[Dict[str, Any]], keep: int, best: str, largest: bool) -> List[Dict[str, Any]]:
    """Return the checkpoints that need not be kept: not pinned, not among the newest, not the best.

    Args:
        best: a metric; the ``keep`` best by it are kept rather than the newest, and the newest one as well.
        largest: whether more of it is better.
    """
    ours = [one for one in rows if one["there"] and one["kind"] == "checkpoint"]
    newest = sorted(ours, key=_age, reverse=True)
    kept = newest[:keep]
    if best:
        told = [one for one in ours if _number(one["metrics"].get(best)) is not None]
        told.sort(key=lambda one: one["metrics"][best], reverse=largest)
        kept = told[:keep] + newest[:1]
    names = {one["path"] for one in kept}
    return [one for one in newest if one["path"] not in names and not one["pinned"]]


def _age(row: Dict[str, Any]) -> Tuple[float, float]:
    step, told = _number(row.get("step")), _number(row.get("time"))
    return (-1.0 if step is None else step, told or 0.0)


def _number(value: Any) -> Optional[float]:
    """Return a number that can be compared; NaN is none."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def prune(run_dir: str, keep: int, best: str, largest: bool, remove: bool) -> List[Dict[str, Any]]:
    """Return what `outdated` names, and remove it if asked to; only what lies in the run directory."""
    gone = [
        one for one in outdated(listing(run_dir, []), keep, best, largest) if not one["path"].startswith("/")
    ]
    for one in gone if remove else []:
        path = os.path.join(run_dir, one["path"])
        doomed = os.path.join(os.path.dirname(path), ".deleting-" + os.path.basename(path))
        _remove(doomed)  # of a prune that was cut off
        os.rename(path, doomed)  # at once it is no checkpoint any more
        _remove(doomed)
    return gone


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def serve(request: Dict[str, Any]) -> Dict[str, Any]:
    """Answer one request: ``op`` (list, pin, unpin, prune), ``run_dir`` and the operation's own values."""
    run_dir = request["run_dir"]
    if not os.path.isdir(run_dir):
        return {"refused": "the run directory {} is gone".format(run_dir)}
    if request["op"] in ("pin", "unpin"):
        return {"pinned": pin(run_dir, request["paths"], request["op"] == "pin")}
    if request["op"] == "prune":
        gone = prune(run_dir, request["keep"], request["best"], request["largest"], request["remove"])
        return {"removed": gone}
    return {"artifacts": listing(run_dir, request.get("checksums", []))}


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the answer to one request, or why it is refused."""
    try:
        return serve(request)
    except OSError as error:
        return {"refused": "{}: {}".format(error.filename, error.strerror)}
