"""The register of a run's artifacts: ``artifacts.jsonl`` in the run directory, one JSON object per line.

Training code may append its own lines, ``{"path": ..., "step": ..., "metrics": {...}}``. Lines with the same
path are merged; for each key the last line wins. Paths are relative to the run directory, or absolute.
`answer` lists, pins, verifies and prunes the artifacts on the host that stores them. Stdlib only, for
Python >= 3.6.
"""

import errno
import glob
import hashlib
import json
import math
import os
import shutil
import time
from typing import Any, Dict, Iterator, List, Tuple

from .lib.json_records import finite_number, read_lines, write_atomically

FILE = "artifacts.jsonl"
PINS = "pins.json"
CHUNK = 1 << 22
BUDGET_S = 60.0  # time for checksums at the end of a job; the remaining ones are computed on request
CLOCKS_S = 60.0  # maximum clock difference between a node and its file server


class DeadlinePassed(Exception):
    """The deadline passed before the checksum was complete."""


def add(run_dir: str, **values: Any) -> None:
    """Append one line with a single write."""
    record = {"schema": 1, "time": round(time.time(), 3)}
    record.update(values)
    descriptor = os.open(os.path.join(run_dir, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(record).encode() + b"\n")
    finally:
        os.close(descriptor)


def lines(run_dir: str) -> Iterator[Dict[str, Any]]:
    """Yield the lines of the register that are JSON objects with a path."""
    for record in read_lines(os.path.join(run_dir, FILE)):
        if isinstance(record.get("path"), str) and record["path"]:
            yield record


def relative(run_dir: str, path: str) -> str:
    """Return a path in the register's form: relative if it is below the run directory, absolute otherwise."""
    full = os.path.normpath(os.path.join(run_dir, path))
    inside = full.startswith(os.path.normpath(run_dir) + "/")
    return os.path.relpath(full, run_dir) if inside else full


def read_entries(run_dir: str) -> Dict[str, Dict[str, Any]]:
    """Return the merged entry of each artifact, keyed by path, in the order of their first lines."""
    entries: Dict[str, Dict[str, Any]] = {}
    for record in lines(run_dir):
        path = relative(run_dir, record["path"])
        entry = entries.setdefault(path, {"metrics": {}})
        metrics = record.get("metrics")
        if isinstance(metrics, dict):
            entry["metrics"].update(metrics)
        if record.get("bytes") is not None or record.get("step", entry.get("step")) != entry.get("step"):
            entry.pop("sha256", None)  # it belongs to the previous version of the file
        entry.update({key: value for key, value in record.items() if key not in ("metrics", "schema")})
        entry["path"] = path
    return entries


def pins(run_dir: str) -> List[str]:
    """Return the paths of pinned artifacts, which must not be pruned.

    Raises:
        OSError: the pin file cannot be read, so it is unknown which artifacts are pinned.
    """
    path = os.path.join(run_dir, PINS)
    try:
        with open(path) as file:
            return [str(pinned_path) for pinned_path in json.load(file)["pinned"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise OSError(
            errno.EINVAL, "the file is damaged; repair it, or remove it and pin the artifacts again", path
        ) from None


def files_of(path: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield a file, or every file below a folder, each with its ``os.stat`` result."""
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
    """Return the ``bytes`` and ``files`` of a file or folder, and its ``sha256`` if ``checksum`` is set.

    The checksum of a folder is the SHA-256 of the lines ``<sha256 of the file>  <path>`` of its files, sorted
    by path.

    Raises:
        DeadlinePassed: the checksum is not complete at ``end`` (monotonic clock).
    """
    size, count, digests = 0, 0, []
    for full, status in files_of(path):
        size, count = size + status.st_size, count + 1
        if checksum:
            digests.append((os.path.relpath(full, path), digest_of(full, end)))
    measured: Dict[str, Any] = {"bytes": size, "files": count}
    if checksum and os.path.isfile(path):
        measured["sha256"] = digests[0][1]
    elif checksum:
        text = "".join("{}  {}\n".format(digest, name) for name, digest in sorted(digests))
        measured["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return measured


def digest_of(path: str, end: float = math.inf) -> str:
    """Return a file's SHA-256.

    Raises:
        DeadlinePassed: hashing is not complete at ``end`` (monotonic clock).
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            if time.monotonic() > end:
                raise DeadlinePassed
            digest.update(chunk)
    return digest.hexdigest()


def collect(run_dir: str, patterns: List[str]) -> None:
    """Register new files that match the patterns, which are absolute or relative to the run directory."""
    deadline = time.monotonic() + BUDGET_S
    attempt_text = os.environ.get("DTSLURM_ATTEMPT", "")
    attempt = int(attempt_text) if attempt_text.isdigit() else 0
    registered = read_entries(run_dir)
    matching_paths = []
    for pattern in patterns:
        base = glob.escape(run_dir) if not pattern.startswith("/") else ""
        matching_paths += sorted(glob.glob(os.path.join(base, pattern), recursive=True))
    for path in dict.fromkeys(
        [*matching_paths, *(os.path.join(run_dir, registered_path) for registered_path in registered)]
    ):
        name = relative(run_dir, path)
        entry = registered.get(name, {})
        if not os.path.exists(path) or is_registered(path, entry, attempt) or name.startswith(FILE):
            continue
        try:
            measured = _measure_before_deadline(path, deadline)
        except OSError:
            continue
        values = {"path": name, "kind": entry.get("kind", "output"), "attempt": attempt}
        add(run_dir, **dict(measured, **values))


def is_registered(path: str, entry: Dict[str, Any], attempt: int) -> bool:
    """Return whether the register has a checksum of the file that the current attempt wrote."""
    if not entry.get("sha256"):
        return False
    if entry.get("kind", "output") != "output" or entry.get("attempt") == attempt:
        return True  # other kinds are written once and registered by their writer
    last_modified = max([status.st_mtime for _, status in files_of(path)] or [0.0])
    return last_modified < (finite_number(entry.get("time")) or 0.0) - CLOCKS_S


def _measure_before_deadline(path: str, end: float) -> Dict[str, Any]:
    """Return what `measure` returns, without a checksum if there is not enough time for it."""
    try:
        return measure(path, time.monotonic() < end, end)
    except DeadlinePassed:
        return measure(path, False)


def register_results(run_dir: str, folder: str) -> None:
    """Register the results copied back from local disks: one artifact per node."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith("node-") or not name.endswith(".json"):
            continue
        with open(os.path.join(folder, name)) as file:
            record = json.load(file)
        if not record.get("final") or not record.get("complete"):
            continue
        rows = sorted(record["files"].items())
        text = "".join("{}  {}\n".format(values["sha256"], path) for path, values in rows)
        add(
            run_dir, path=relative(run_dir, os.path.join(folder, name[:-5])), kind="results",
            bytes=sum(values["bytes"] for _, values in rows), files=len(rows), node=record.get("node"),
            sha256=hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest(),
        )  # fmt: skip


# ---- on the host that stores the run, for the command line ----


def listing(run_dir: str, checksums: List[str]) -> List[Dict[str, Any]]:
    """Return each artifact's entry with its current state: ``there`` (it exists), ``pinned`` and sizes.

    Args:
        checksums: paths whose checksum is computed now and returned as ``now_sha256``.
    """
    pinned_paths = set(pins(run_dir))
    rows = []
    for path, entry in read_entries(run_dir).items():
        full = os.path.join(run_dir, path)
        row = dict(entry, path=path, there=os.path.exists(full), pinned=path in pinned_paths)
        if row["there"]:
            measured = measure(full, path in checksums)
            row["now_bytes"] = measured["bytes"]
            row.setdefault("files", measured["files"])
            if "sha256" in measured:
                row["now_sha256"] = measured["sha256"]
        row.setdefault("kind", "output")
        rows.append(row)
    return rows


def pin(run_dir: str, paths: List[str], keep: bool) -> List[str]:
    """Pin artifacts (``keep``) or unpin them; return all paths pinned afterwards."""
    pinned_paths = set(pins(run_dir))
    pinned_paths = pinned_paths | set(paths) if keep else pinned_paths - set(paths)
    text = json.dumps({"schema": 1, "pinned": sorted(pinned_paths)})
    write_atomically(os.path.join(run_dir, PINS), text + "\n")
    return sorted(pinned_paths)


def removable_checkpoints(
    rows: List[Dict[str, Any]], keep: int, best: str, largest: bool
) -> List[Dict[str, Any]]:
    """Return the checkpoints that may be removed: not pinned, not among the newest, not among the best.

    Args:
        best: a metric; if given, the ``keep`` best checkpoints by this metric and the newest one are
            retained, instead of the ``keep`` newest.
        largest: whether a larger value of the metric is better.
    """
    checkpoints = [row for row in rows if row["there"] and row["kind"] == "checkpoint"]
    newest = sorted(checkpoints, key=_recency_key, reverse=True)
    retained = newest[:keep]
    if best:
        scored = [row for row in checkpoints if finite_number(row["metrics"].get(best)) is not None]
        scored.sort(key=lambda artifact: artifact["metrics"][best], reverse=largest)
        retained = scored[:keep] + newest[:1]
    retained_paths = {row["path"] for row in retained}
    return [row for row in newest if row["path"] not in retained_paths and not row["pinned"]]


def _recency_key(row: Dict[str, Any]) -> Tuple[float, float]:
    step, time_s = finite_number(row.get("step")), finite_number(row.get("time"))
    return (-1.0 if step is None else step, time_s or 0.0)


def prune(run_dir: str, keep: int, best: str, largest: bool, remove: bool) -> List[Dict[str, Any]]:
    """Return the checkpoints that `removable_checkpoints` selects; delete them if ``remove`` is set."""
    removable = [
        row
        for row in removable_checkpoints(listing(run_dir, []), keep, best, largest)
        if not row["path"].startswith("/")
    ]
    for row in removable if remove else []:
        path = os.path.join(run_dir, row["path"])
        trash = os.path.join(os.path.dirname(path), ".deleting-" + os.path.basename(path))
        _remove(trash)  # left over from an interrupted prune
        os.rename(path, trash)  # the rename is atomic: a partly deleted folder never looks like a checkpoint
        _remove(trash)
    return removable


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def serve(request: Dict[str, Any]) -> Dict[str, Any]:
    """Handle a request: ``op`` (list, pin, unpin, prune), ``run_dir`` and the operation's arguments."""
    run_dir = request["run_dir"]
    if not os.path.isdir(run_dir):
        return {"refused": "the run directory {} no longer exists".format(run_dir)}
    if request["op"] in ("pin", "unpin"):
        return {"pinned": pin(run_dir, request["paths"], request["op"] == "pin")}
    if request["op"] == "prune":
        removed = prune(run_dir, request["keep"], request["best"], request["largest"], request["remove"])
        return {"removed": removed}
    return {"artifacts": listing(run_dir, request.get("checksums", []))}


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the response to one request; ``refused`` in the response contains the reason of a failure."""
    try:
        return serve(request)
    except OSError as error:
        return {"refused": "{}: {}".format(error.filename, error.strerror)}
