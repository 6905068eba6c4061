"""Stage the data of one attempt, coordinated by the node that runs the batch script.

Staging queries all nodes, then copies, then reports.

::

    staging in    --ranks-per-node N --stage ITEM... -- SRUN...    before training
    staging out   --from ITEM... -- SRUN...                        after training
    staging watch PID SIGNAL --from ITEM...                        on each node, for the early signal
    staging artifacts PATTERN...                                   register matching files

``SRUN`` starts one task on each node; each task is this program again, as ``staging node VERB FOLDER``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..artifacts import digest_of
from ..lib.json_records import read_object
from . import copying, node, results
from .files import Failed, Listed, clock, event, human, put, remaining, total, tree
from .request import Item, choose, parse, shard

FAILED = 88  # exit code: data could not be staged, or results could not be copied back
NEAR_S = 600  # seconds; with less remaining time, the early signal may have caused the failure


class StagedItem(NamedTuple):
    """An item and its files.

    ``shares`` has the file indices of each node, None if each node gets all files.
    """

    item: Item
    files: List[Listed]
    shares: Optional[List[List[int]]] = None


class Staging:
    """The staging of one attempt, coordinated by the first node."""

    def __init__(self, srun: List[str], ranks_per_node: int = 1) -> None:
        self.srun = srun
        self.ranks_per_node = ranks_per_node
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.attempt = os.environ.get("DTSLURM_ATTEMPT", "0")
        self.nodes = next((int(option[8:]) for option in srun if option.startswith("--nodes=")), 1)
        self.folder = os.path.join(self.run_dir, "staged", self.attempt)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)

    def bring(self, items: List[Item]) -> None:
        """Copy all items to all nodes.

        Raises:
            Failed: an item could not be copied. If the nodes reported problems, nothing was copied.
        """
        started_at = time.monotonic()
        sources = [self._list_source(item) for item in items]
        rows = [[source.item.text, source.item.method, source.files, source.shares] for source in sources]
        put(os.path.join(self.folder, "sources.json"), {"schema": 1, "sources": rows})
        surveys = self._run_on_nodes("look")
        problems = [line for survey in surveys for line in survey["problems"]]
        if problems:
            # The problem is not specific to some nodes.
            if self.nodes > 1 and all(survey["problems"] for survey in surveys):
                problems = [
                    "on all {} nodes, for example {}".format(self.nodes, line)
                    for line in surveys[0]["problems"]
                ]
            say("nothing was copied")
            raise Failed(*problems[:20])
        sources = [self._merge_shares_by_disk(source, surveys) for source in sources]
        plan = [self._plan_source(source, surveys) for source in sources]
        packed = [entry["packed"]["path"] for entry in plan if entry["packed"] and entry["method"] == "pack"]
        try:
            put(os.path.join(self.folder, "plan.json"), {"schema": 1, "nodes": self.nodes, "sources": plan})
            answers = self._run_on_nodes("bring") if any(entry["lacking"] for entry in plan) else []
        finally:
            for path in packed:
                os.unlink(path)
        self._report(sources, plan, surveys, answers, time.monotonic() - started_at)

    def _list_source(self, item: Item) -> StagedItem:
        try:
            files = tree(item.source)
        except OSError as error:
            raise Failed(
                "{} cannot be read on {}: {}".format(
                    error.filename or item.source, node.name(), error.strerror
                )
            ) from None
        if not files:
            raise Failed("there are no files in {}".format(item.source))
        if item.method == "unpack" and files[0][0]:
            raise Failed("{} is a folder; method=unpack is for one archive".format(item.source))
        return StagedItem(item, files, self._assign_shares(item, files))

    def _assign_shares(self, item: Item, files: List[Listed]) -> Optional[List[List[int]]]:
        """Return the files of each node.

        Write each rank's or node's files to a record for the training code.
        """
        if not item.shards:
            return None
        world = self.nodes * self.ranks_per_node
        share_count = world if item.shards == "rank" else self.nodes
        if len(files) < share_count:
            text = "{} has {} files, too few for {} {}s"
            raise Failed(text.format(item.source, len(files), share_count, item.shards))
        indices_by_share = shard([size for _, size, _ in files], share_count)
        rows = [
            {"path": files[index][0], "bytes": files[index][1], item.shards: share_index}
            for share_index, indices in enumerate(indices_by_share)
            for index in indices
        ]
        record = {"schema": 1, "by": item.shards, "nodes": self.nodes, "world_size": world, "files": rows}
        put(os.path.join(self.run_dir, "staged", item.name + ".shards.json"), record)
        if item.shards == "node":
            return indices_by_share
        ranks_per_node = self.ranks_per_node
        return [
            _merge_indices(indices_by_share[rank * ranks_per_node : (rank + 1) * ranks_per_node])
            for rank in range(self.nodes)
        ]

    def _merge_shares_by_disk(self, source: StagedItem, looks: List[Dict[str, Any]]) -> StagedItem:
        """Merge the shares of nodes with a common disk, as on a machine that emulates several nodes."""
        if source.shares is None:
            return source
        ranks_by_disk: Dict[Tuple[str, str, str], List[int]] = {}
        for survey in looks:
            item_place = survey["places"][source.item.name]
            ranks_by_disk.setdefault(
                (survey["machine"], str(item_place["disk"]), item_place["to"]), []
            ).append(survey["node_rank"])
        shares = list(source.shares)
        for ranks in ranks_by_disk.values():
            merged = _merge_indices([source.shares[rank] for rank in ranks])
            for rank in ranks:
                shares[rank] = merged
        return source._replace(shares=shares)

    def _plan_source(self, source: StagedItem, looks: List[Dict[str, Any]]) -> Dict[str, Any]:
        """Return how one source is copied, after packing and sending a source that goes as one file."""
        item, files = source.item, source.files
        if source.shares is None:
            lacking_ranks = [look["node_rank"] for look in looks if not look["places"][item.name]["whole"]]
        else:  # each node checks its own share again, which may have grown
            lacking_ranks = list(range(self.nodes))
        destinations = {look["places"][item.name]["to"] for look in looks}
        uses_all_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "") == str(self.nodes)
        sbcast = uses_all_nodes and shutil.which("sbcast") is not None
        disks = {(look["machine"], str(look["places"][item.name]["disk"])) for look in looks}
        separate_disks = len(disks) == self.nodes
        method = choose(
            item,
            len(files),
            total(files),
            len(lacking_ranks),
            len(destinations) == 1 and separate_disks,
            sbcast,
        )
        if item.method == "sbcast" and method != "sbcast" and lacking_ranks:
            text = "{}: sbcast is missing, or does not support these nodes and shares; method={} is used"
            say(text.format(item.source, method))
        packed = None
        if method in ("pack", "sbcast") and lacking_ranks:
            method, packed = self._pack_source(source, method, destinations)
        rows = [[list(listed) for listed in files], source.shares]
        return {
            "item": item.text,
            "method": method,
            "packed": packed,
            "lacking": lacking_ranks,
            "files": rows,
        }

    def _pack_source(
        self, source: StagedItem, method: str, places: Any
    ) -> Tuple[str, Optional[Dict[str, str]]]:
        """Pack a source into one file, and send the file if the method is sbcast.

        Fall back to plain copies.
        """
        item, files = source.item, source.files
        is_single_file = not files[0][0]
        disk_status = os.statvfs(self.folder)
        has_room = (
            disk_status.f_bavail * disk_status.f_frsize > (total(files) + len(files) * 1024) * node.HEADROOM
        )
        if (
            (is_single_file and method == "pack")
            or not (is_single_file or has_room)
            or not (is_single_file or shutil.which("tar"))
        ):
            return "copy", None
        path = item.source if is_single_file else os.path.join(self.folder, item.name + ".tar")
        try:
            digest = digest_of(path) if is_single_file else copying.pack(item.source, files, path)
        except (OSError, Failed) as error:
            say("{}; the data is copied file by file".format(error))
            return "copy", None
        if method == "sbcast":
            sent_path = node.ItemPaths(item, dict(os.environ)).sent
            process = subprocess.run(
                ["sbcast", "--force", path, sent_path],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
            if not is_single_file:
                os.unlink(path)
            if process.returncode != 0:  # sbcast leaves partial files behind, which are never used
                say("sbcast failed: {}".format(process.stderr.decode("utf-8", "replace").strip()[-200:]))
                return "copy", None
        return method, {"path": path, "sha256": digest}

    def _run_on_nodes(self, verb: str) -> List[Dict[str, Any]]:
        """Run one task on each node and return the answers in node order.

        Raises:
            Failed: a node gave no answer, or reported a failure.
        """
        answers = ask(self.srun, verb, self.folder, self.nodes)
        failed = [line for node_answer in answers for line in node_answer.get("failed", [])]
        if failed:
            raise Failed(*failed[:20])
        return answers

    def _report(
        self, sources: List[StagedItem], plan: List[Dict[str, Any]], looks: List[Dict[str, Any]],
        done: List[Dict[str, Any]], seconds: float,
    ) -> None:  # fmt: skip
        total_bytes = 0
        for source in sources:
            name = source.item.name
            summaries = [answer["items"][name] for answer in done if name in answer["items"]]
            nodes_by_digest: Dict[str, List[str]] = {}
            for answer in done:
                if name in answer["items"]:
                    nodes_by_digest.setdefault(answer["items"][name]["sha256"], []).append(answer["node"])
            if len(nodes_by_digest) > 1 and source.shares is None and source.item.method != "rsync":
                deviating_nodes = min(nodes_by_digest.values(), key=len)
                raise Failed(
                    "{} was read differently on {}: the checksums differ".format(
                        name, ", ".join(deviating_nodes)
                    )
                )
            copied_nodes = sum(1 for summary in summaries if not summary["kept"])
            size = sum(summary["bytes"] for summary in summaries)
            total_bytes += size
            destination = looks[0]["places"][name]["to"]
            method = next((entry["method"] for entry in plan if parse(entry["item"]).name == name), "")
            if copied_nodes:
                text = "staged {} to {} on {} of {} nodes by {}, {} in all"
                say(
                    text.format(
                        source.item.source, destination, copied_nodes, self.nodes, method, human(size)
                    )
                )
            else:
                say("{} is already on all nodes, at {}".format(source.item.source, destination))
        remaining_s = remaining()
        event("staged", seconds=round(seconds, 3), bytes=total_bytes, left=remaining_s and round(remaining_s))
        say(
            "staging took {}{}".format(
                clock(seconds),
                "" if remaining_s is None else "; {} of the time limit are left".format(clock(remaining_s)),
            )
        )


def _merge_indices(shares: List[List[int]]) -> List[int]:
    return sorted(index for share in shares for index in share)


def ask(srun: List[str], verb: str, folder: str, nodes: int) -> List[Dict[str, Any]]:
    """Run ``node VERB FOLDER`` on each node.

    Return all answers in node order, with a failure for missing ones.

    Raises:
        Failed: no node answered.
    """
    argv = [*srun, sys.executable or "python3", "-BES", os.path.abspath(sys.argv[0]), "node", verb, folder]
    for rank in range(nodes):
        path = os.path.join(folder, "{}-{}.json".format(verb, rank))
        if os.path.exists(path):
            os.unlink(path)
    process = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
    answers, silent_ranks = [], []
    deadline = time.monotonic() + (30 if process.returncode == 0 else 5)  # NFS may show the answers late
    for rank in range(nodes):
        path = os.path.join(folder, "{}-{}.json".format(verb, rank))
        while not os.path.exists(path) and time.monotonic() < deadline:
            os.listdir(folder)
            time.sleep(0.1)
        answer = read_object(path)
        if answer:
            answers.append(answer)
        else:
            silent_ranks.append(rank)
    if len(silent_ranks) == nodes:
        raise Failed("no node could be checked: srun ended with exit code {}".format(process.returncode))
    names = _node_names(folder)
    for rank in silent_ranks:
        node_label = names.get(rank, "node number {}".format(rank))
        phase = (
            "before it had checked its disk"
            if verb == "look"
            else "while it copied the data; its incomplete copy is not used"
        )
        answers.append(
            {
                "node": node_label,
                "items": {},
                "failed": ["{} ended without an error message {}".format(node_label, phase)],
            }
        )
    return answers


def _node_names(folder: str) -> Dict[int, str]:
    name_by_rank = {}
    for entry in os.listdir(folder):
        if entry.startswith("look-") and entry.endswith(".json"):
            survey = read_object(os.path.join(folder, entry))
            name_by_rank[int(survey.get("node_rank", -1))] = str(survey.get("node"))
    return name_by_rank


def say(text: str) -> None:
    """Print a line to the job's output."""
    sys.stdout.write("dtslurm: {}\n".format(text))
    sys.stdout.flush()


# ---- on each node ----


def on_node(verb: str, folder: str) -> int:
    """Handle one request of `Staging` or `results`, and write the answer to a file."""
    answer: Dict[str, Any] = {"node": node.name(), "node_rank": node.rank(), "items": {}}
    try:
        if verb == "look":
            answer = _survey_node(folder)
        elif verb == "bring":
            _copy_items(folder, answer)
        else:
            results.on_node(folder, answer, final=True)
    except Failed as error:
        answer["failed"] = ["{}: {}".format(node.name(), line) for line in error.args]
    except OSError as error:
        answer["failed"] = ["{}: {}: {}".format(node.name(), error.filename, error.strerror)]
    put(os.path.join(folder, "{}-{}.json".format(verb, node.rank())), answer)
    return 0


def _own_files(files: Sequence[Any], shares: Optional[List[List[int]]]) -> List[Listed]:
    listed = [(str(row[0]), int(row[1]), int(row[2])) for row in files]
    return listed if shares is None else [listed[index] for index in shares[node.rank()]]


def _survey_node(folder: str) -> Dict[str, Any]:
    source_rows = read_object(os.path.join(folder, "sources.json"))["sources"]
    items = []
    for text, method, files, shares in source_rows:
        item, own_files = parse(text), _own_files(files, shares)
        items.append((item, own_files, "copy" if method == "auto" else method))
    return node.look(items, dict(os.environ))


def _copy_items(folder: str, answer: Dict[str, Any]) -> None:
    plan = read_object(os.path.join(folder, "plan.json"))
    for source in plan["sources"]:
        if node.rank() not in source["lacking"]:
            continue
        item, files = parse(source["item"]), _own_files(*source["files"])
        summary = node.bring(
            item, files, source["method"], source["packed"] or {}, len(source["lacking"]), dict(os.environ)
        )
        answer["items"][item.name] = summary


# ---- command line ----


def main() -> None:
    """Run the command that the batch script or `ask` passes."""
    arguments = sys.argv[1:]
    srun = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    os.umask(os.umask(0o077) | 0o022)  # only the user may write to staged files
    if arguments[0] == "node":
        sys.exit(on_node(arguments[1], arguments[2]))
    if arguments[0] == "artifacts":
        from .. import artifacts

        artifacts.collect(os.environ["DTSLURM_RUN_DIR"], arguments[1:])
        return
    parser = argparse.ArgumentParser(prog="staging")
    parser.add_argument("verb", choices=["in", "out", "watch"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--stage", action="append", default=[])
    parser.add_argument("--from", action="append", default=[], dest="out")
    parsed = parser.parse_args(arguments)
    if parsed.verb == "watch":
        results.watch(
            int(parsed.rest[0]), parsed.rest[1], [parse(text, is_stage_out=True) for text in parsed.out]
        )
        return
    try:
        if parsed.verb == "in":
            Staging(srun, parsed.ranks_per_node).bring([parse(text) for text in parsed.stage])
        else:
            results.gather(srun, [parse(text, is_stage_out=True) for text in parsed.out], ask, say)
    except Failed as error:
        _exit_with_failure(error.args)
    except OSError as error:
        _exit_with_failure(["{}: {}".format(error.filename or "the run directory", error.strerror or error)])


def _exit_with_failure(lines: Sequence[str]) -> None:
    """Report why data cannot be staged or copied back, and exit."""
    for line in lines:
        say("staging failed: {}".format(line))
    remaining_s = remaining()
    if remaining_s is not None and remaining_s < NEAR_S:
        say(
            "only {} of the time limit were left: request more --time, or stage less data".format(
                clock(remaining_s)
            )
        )
    event("staging_failed", problems=[str(line) for line in lines])
    sys.exit(FAILED)
