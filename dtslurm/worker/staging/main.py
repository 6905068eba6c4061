"""Stages for one attempt, from the node that runs the batch script: ask all nodes, then copy, then tell.

::

    staging in    --ranks-per-node N --stage ITEM... -- SRUN...    before training
    staging out   --from ITEM... -- SRUN...                        after it
    staging watch PID SIGNAL --from ITEM...                        on each node, for the early signal
    staging artifacts PATTERN...                                   registers what matches

``SRUN`` starts one task on each node; each is this program again, as ``staging node VERB FOLDER``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..artifacts import digest_of
from . import copying, node, results
from .files import Failed, Listed, clock, event, human, load, put, remaining, total, tree
from .request import Item, choose, parse, shard

FAILED = 88  # exit code: data could not be staged, or results not brought back
NEAR_S = 600  # of the time limit left, when that may be why: the early signal ends what copies


class StagedItem(NamedTuple):
    """An item and its files; ``shares`` has the numbers of each node's files where not all get all."""

    item: Item
    files: List[Listed]
    shares: Optional[List[List[int]]] = None


class Staging:
    """One attempt's staging, as the first node sees it."""

    def __init__(self, srun: List[str], ranks_per_node: int = 1) -> None:
        self.srun = srun
        self.ranks_per_node = ranks_per_node
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.attempt = os.environ.get("DTSLURM_ATTEMPT", "0")
        self.nodes = next((int(one[8:]) for one in srun if one.startswith("--nodes=")), 1)
        self.folder = os.path.join(self.run_dir, "staged", self.attempt)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)

    def bring(self, items: List[Item]) -> None:
        """Bring all items to all nodes.

        Raises:
            Failed: something could not be brought; what has been said before anything is copied says so.
        """
        began = time.monotonic()
        sources = [self._source(item) for item in items]
        wanted = [[one.item.text, one.item.method, one.files, one.shares] for one in sources]
        put(os.path.join(self.folder, "sources.json"), {"schema": 1, "sources": wanted})
        looks = self._ask("look")
        problems = [line for look in looks for line in look["problems"]]
        if problems:
            if self.nodes > 1 and all(look["problems"] for look in looks):  # not a matter of some node
                problems = [
                    "on all {} nodes, as on {}".format(self.nodes, line) for line in looks[0]["problems"]
                ]
            say("nothing was copied")
            raise Failed(*problems[:20])
        sources = [self._by_machine(one, looks) for one in sources]
        plan = [self._planned(one, looks) for one in sources]
        packed = [one["packed"]["path"] for one in plan if one["packed"] and one["method"] == "pack"]
        try:
            put(os.path.join(self.folder, "plan.json"), {"schema": 1, "nodes": self.nodes, "sources": plan})
            done = self._ask("bring") if any(one["lacking"] for one in plan) else []
        finally:
            for path in packed:
                os.unlink(path)
        self._tell(sources, plan, looks, done, time.monotonic() - began)

    def _source(self, item: Item) -> StagedItem:
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
        return StagedItem(item, files, self._shares(item, files))

    def _shares(self, item: Item, files: List[Listed]) -> Optional[List[List[int]]]:
        """Return the files of each node, and write down which rank has which for training code to read."""
        if not item.shards:
            return None
        world = self.nodes * self.ranks_per_node
        hands = world if item.shards == "rank" else self.nodes
        if len(files) < hands:
            text = "{} has {} files, too few for {} {}s"
            raise Failed(text.format(item.source, len(files), hands, item.shards))
        dealt = shard([size for _, size, _ in files], hands)
        rows = [
            {"path": files[index][0], "bytes": files[index][1], item.shards: hand}
            for hand, indices in enumerate(dealt)
            for index in indices
        ]
        told = {"schema": 1, "by": item.shards, "nodes": self.nodes, "world_size": world, "files": rows}
        put(os.path.join(self.run_dir, "staged", item.name + ".shards.json"), told)
        if item.shards == "node":
            return dealt
        per = self.ranks_per_node
        return [_union(dealt[one * per : (one + 1) * per]) for one in range(self.nodes)]

    def _by_machine(self, source: StagedItem, looks: List[Dict[str, Any]]) -> StagedItem:
        """Give nodes that have one disk, as on a machine that plays several nodes, all of their shares."""
        if source.shares is None:
            return source
        groups: Dict[Tuple[str, str, str], List[int]] = {}
        for look in looks:
            place = look["places"][source.item.name]
            groups.setdefault((look["machine"], str(place["disk"]), place["to"]), []).append(
                look["node_rank"]
            )
        shares = list(source.shares)
        for ranks in groups.values():
            union = _union([source.shares[one] for one in ranks])
            for one in ranks:
                shares[one] = union
        return source._replace(shares=shares)

    def _planned(self, source: StagedItem, looks: List[Dict[str, Any]]) -> Dict[str, Any]:
        """Return how one source is brought, having packed and sent what goes as one file."""
        item, files = source.item, source.files
        if source.shares is None:
            lacking = [one["node_rank"] for one in looks if not one["places"][item.name]["whole"]]
        else:  # nodes look at their own share again, which may have grown
            lacking = list(range(self.nodes))
        places = {one["places"][item.name]["to"] for one in looks}
        own = os.environ.get("SLURM_JOB_NUM_NODES", "") == str(self.nodes)
        sbcast = own and shutil.which("sbcast") is not None
        machines = {(one["machine"], str(one["places"][item.name]["disk"])) for one in looks}
        apart = len(machines) == self.nodes
        method = choose(item, len(files), total(files), len(lacking), len(places) == 1 and apart, sbcast)
        if item.method == "sbcast" and method != "sbcast" and lacking:
            text = "{}: sbcast is not there, or does not suit these nodes and shares; method={} is taken"
            say(text.format(item.source, method))
        packed = None
        if method in ("pack", "sbcast") and lacking:
            method, packed = self._packed(source, method, places)
        rows = [[list(one) for one in files], source.shares]
        return {"item": item.text, "method": method, "packed": packed, "lacking": lacking, "files": rows}

    def _packed(self, source: StagedItem, method: str, places: Any) -> Tuple[str, Optional[Dict[str, str]]]:
        """Pack a source into one file, and send it where that is wanted; fall back on plain copies."""
        item, files = source.item, source.files
        single = not files[0][0]
        disk = os.statvfs(self.folder)
        room = disk.f_bavail * disk.f_frsize > (total(files) + len(files) * 1024) * node.HEADROOM
        if (single and method == "pack") or not (single or room) or not (single or shutil.which("tar")):
            return "copy", None
        path = item.source if single else os.path.join(self.folder, item.name + ".tar")
        try:
            digest = digest_of(path) if single else copying.pack(item.source, files, path)
        except (OSError, Failed) as error:
            say("{}; it is copied file by file".format(error))
            return "copy", None
        if method == "sbcast":
            to = node.ItemPaths(item, dict(os.environ)).sent
            done = subprocess.run(
                ["sbcast", "--force", path, to],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
            if not single:
                os.unlink(path)
            if done.returncode != 0:  # it leaves parts behind; they are never looked at
                say("sbcast failed: {}".format(done.stderr.decode("utf-8", "replace").strip()[-200:]))
                return "copy", None
        return method, {"path": path, "sha256": digest}

    def _ask(self, verb: str) -> List[Dict[str, Any]]:
        """Run one task on each node and return their answers by node.

        Raises:
            Failed: one gave none, or says what went wrong.
        """
        answers = ask(self.srun, verb, self.folder, self.nodes)
        failed = [line for one in answers for line in one.get("failed", [])]
        if failed:
            raise Failed(*failed[:20])
        return answers

    def _tell(
        self, sources: List[StagedItem], plan: List[Dict[str, Any]], looks: List[Dict[str, Any]],
        done: List[Dict[str, Any]], seconds: float,
    ) -> None:  # fmt: skip
        moved = 0
        for source in sources:
            name = source.item.name
            found = [one["items"][name] for one in done if name in one["items"]]
            sums: Dict[str, List[str]] = {}
            for one in done:
                if name in one["items"]:
                    sums.setdefault(one["items"][name]["sha256"], []).append(one["node"])
            if len(sums) > 1 and source.shares is None and source.item.method != "rsync":
                odd = min(sums.values(), key=len)
                raise Failed("{} was read otherwise on {}: its checksums differ".format(name, ", ".join(odd)))
            copied = sum(1 for one in found if not one["kept"])
            size = sum(one["bytes"] for one in found)
            moved += size
            to = looks[0]["places"][name]["to"]
            how = next((one["method"] for one in plan if parse(one["item"]).name == name), "")
            if copied:
                text = "staged {} to {} on {} of {} nodes by {}, {} in all"
                say(text.format(source.item.source, to, copied, self.nodes, how, human(size)))
            else:
                say("{} is on all nodes already, at {}".format(source.item.source, to))
        left = remaining()
        event("staged", seconds=round(seconds, 3), bytes=moved, left=left and round(left))
        say(
            "staging took {}{}".format(
                clock(seconds), "" if left is None else "; {} of the time limit are left".format(clock(left))
            )
        )


def _union(shares: List[List[int]]) -> List[int]:
    return sorted(index for share in shares for index in share)


def ask(srun: List[str], verb: str, folder: str, nodes: int) -> List[Dict[str, Any]]:
    """Run ``node VERB FOLDER`` on each node; return all answers by node, a silent one's made up.

    Raises:
        Failed: the step could not be started.
    """
    argv = [*srun, sys.executable or "python3", "-BES", os.path.abspath(sys.argv[0]), "node", verb, folder]
    for rank in range(nodes):
        path = os.path.join(folder, "{}-{}.json".format(verb, rank))
        if os.path.exists(path):
            os.unlink(path)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
    answers, silent = [], []
    end = time.monotonic() + (30 if done.returncode == 0 else 5)  # NFS shows them late
    for rank in range(nodes):
        path = os.path.join(folder, "{}-{}.json".format(verb, rank))
        while not os.path.exists(path) and time.monotonic() < end:
            os.listdir(folder)
            time.sleep(0.1)
        answer = load(path)
        if answer:
            answers.append(answer)
        else:
            silent.append(rank)
    if len(silent) == nodes:
        raise Failed("no node could be asked: srun ended with {}".format(done.returncode))
    names = _names(folder)
    for rank in silent:
        who = names.get(rank, "node number {}".format(rank))
        what = (
            "before it had looked"
            if verb == "look"
            else "while it copied; what it has is not taken for whole"
        )
        answers.append({"node": who, "items": {}, "failed": ["{} ended without a word {}".format(who, what)]})
    return answers


def _names(folder: str) -> Dict[int, str]:
    found = {}
    for entry in os.listdir(folder):
        if entry.startswith("look-") and entry.endswith(".json"):
            look = load(os.path.join(folder, entry))
            found[int(look.get("node_rank", -1))] = str(look.get("node"))
    return found


def say(text: str) -> None:
    """Print a line into the job's output."""
    sys.stdout.write("dtslurm: {}\n".format(text))
    sys.stdout.flush()


# ---- on each node ----


def on_node(verb: str, folder: str) -> int:
    """Serve one question of `Staging` or of `results`, and write the answer down."""
    answer: Dict[str, Any] = {"node": node.name(), "node_rank": node.rank(), "items": {}}
    try:
        if verb == "look":
            answer = _look(folder)
        elif verb == "bring":
            _bring(folder, answer)
        else:
            results.on_node(folder, answer, final=True)
    except Failed as error:
        answer["failed"] = ["{}: {}".format(node.name(), line) for line in error.args]
    except OSError as error:
        answer["failed"] = ["{}: {}: {}".format(node.name(), error.filename, error.strerror)]
    put(os.path.join(folder, "{}-{}.json".format(verb, node.rank())), answer)
    return 0


def _own(files: Sequence[Any], shares: Optional[List[List[int]]]) -> List[Listed]:
    listed = [(str(one[0]), int(one[1]), int(one[2])) for one in files]
    return listed if shares is None else [listed[index] for index in shares[node.rank()]]


def _look(folder: str) -> Dict[str, Any]:
    asked = load(os.path.join(folder, "sources.json"))["sources"]
    items = []
    for text, method, files, shares in asked:
        item, mine = parse(text), _own(files, shares)
        items.append((item, mine, "copy" if method == "auto" else method))
    return node.look(items, dict(os.environ))


def _bring(folder: str, answer: Dict[str, Any]) -> None:
    plan = load(os.path.join(folder, "plan.json"))
    for one in plan["sources"]:
        if node.rank() not in one["lacking"]:
            continue
        item, files = parse(one["item"]), _own(*one["files"])
        done = node.bring(
            item, files, one["method"], one["packed"] or {}, len(one["lacking"]), dict(os.environ)
        )
        answer["items"][item.name] = done


# ---- the command ----


def main() -> None:
    """Run as the batch script asks."""
    words = sys.argv[1:]
    srun = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    os.umask(os.umask(0o077) | 0o022)  # what is staged is for the user alone to write
    if words[0] == "node":
        sys.exit(on_node(words[1], words[2]))
    if words[0] == "artifacts":
        from .. import artifacts

        artifacts.collect(os.environ["DTSLURM_RUN_DIR"], words[1:])
        return
    parser = argparse.ArgumentParser(prog="staging")
    parser.add_argument("verb", choices=["in", "out", "watch"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--stage", action="append", default=[])
    parser.add_argument("--from", action="append", default=[], dest="out")
    asked = parser.parse_args(words)
    if asked.verb == "watch":
        results.watch(int(asked.rest[0]), asked.rest[1], [parse(one, out=True) for one in asked.out])
        return
    try:
        if asked.verb == "in":
            Staging(srun, asked.ranks_per_node).bring([parse(one) for one in asked.stage])
        else:
            results.gather(srun, [parse(one, out=True) for one in asked.out], ask, say)
    except Failed as error:
        _give_up(error.args)
    except OSError as error:
        _give_up(["{}: {}".format(error.filename or "the run directory", error.strerror or error)])


def _give_up(lines: Sequence[str]) -> None:
    """Say why data cannot be staged or brought back, and end."""
    for line in lines:
        say("staging failed: {}".format(line))
    left = remaining()
    if left is not None and left < NEAR_S:
        say("{} of the time limit were left: ask for more --time, or stage less".format(clock(left)))
    event("staging_failed", problems=[str(line) for line in lines])
    sys.exit(FAILED)
