"""What torch's flight recorder left: of each process group the last collectives of a rank."""

import glob
import json
import os
import pickle
import re
from typing import Any, Dict, List

from .log_stacks import LIBRARY

LARGEST_DUMP = 32 << 20


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
            if rank:
                try:
                    if os.path.getsize(path) > LARGEST_DUMP:
                        continue
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
