"""Reads the dumps of torch's flight recorder: the last collectives of a rank in each process group."""

import glob
import json
import os
import pickle
import re
from typing import Any, Dict, List

from .log_stacks import LIBRARY

LARGEST_DUMP = 32 << 20


class Plain(pickle.Unpickler):
    """Unpickler for lists, dicts, numbers and strings, which refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse all classes and functions, except that torch's typed lists are read as lists."""
        if module == "torch.jit._pickle" and name in {
            "build_intlist",
            "build_doublelist",
            "build_tensorlist",
        }:
            return list
        raise pickle.UnpicklingError("a flight record must not contain {}.{}".format(module, name))


def flight_dumps(*folders: str) -> List[Dict[str, Any]]:
    """Return the last collective of each process group from each dump of torch's flight recorder."""
    dumps = []
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "flight_*"))):
            match = re.search(r"(\d+)$", path)
            if match:
                try:
                    if os.path.getsize(path) > LARGEST_DUMP:
                        continue
                    with open(path, "rb") as file:
                        groups = flight_groups(file)
                except Exception:  # noqa: BLE001, S112 - a truncated or foreign file is no evidence
                    continue
                dumps.append({"rank": int(match.group(1)), "file": os.path.basename(path), "groups": groups})
    return dumps


def flight_groups(file: Any) -> Dict[str, Any]:
    """Return for each process group its last enqueued, last completed and first incomplete collective."""
    first_byte = file.read(1)
    file.seek(0)
    dump = json.loads(file.read().decode()) if first_byte == b"{" else Plain(file).load()
    groups: Dict[str, Any] = {}
    for entry in dump.get("entries", []):
        sequence = entry.get("collective_seq_id")
        if entry.get("is_p2p") or not isinstance(sequence, int):
            continue
        group = groups.setdefault(
            str(entry.get("process_group", "")), {"enqueued": -1, "completed": -1, "stuck": None}
        )
        group["enqueued"] = max(group["enqueued"], sequence)
        done_by_gloo = entry.get("retired") and str(entry.get("profiling_name", "")).startswith("gloo:")
        if done_by_gloo or entry.get("state") == "completed":  # gloo marks completed work only as retired
            group["completed"] = max(group["completed"], sequence)
            if group["stuck"] is not None and group["stuck"]["seq"] <= sequence:
                group["stuck"] = None  # completion is recorded late; a group's operations complete in order
        elif sequence > group["completed"] and (group["stuck"] is None or sequence < group["stuck"]["seq"]):
            frames = entry.get("frames") or []
            user_frames = [
                frame
                for frame in frames
                if isinstance(frame, dict) and not LIBRARY.search(str(frame.get("filename", "")))
            ]
            location = (
                "{filename}:{line}".format(**user_frames[0])
                if user_frames and {"filename", "line"} <= set(user_frames[0])
                else ""
            )
            group["stuck"] = {
                "seq": sequence,
                "op": str(entry.get("profiling_name", ""))[:80],
                "state": str(entry.get("state", ""))[:40],
                "where": location[-200:],
            }
    return groups
