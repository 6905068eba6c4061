"""What is to be staged, as it is written: ``SRC[:DST[:OPTION,...]]``. Pure."""

import os
import re
from typing import Dict, List, NamedTuple, Sequence

METHODS = ("auto", "copy", "pack", "sbcast", "rsync", "unpack")
SHARDS = ("node", "rank")
_PLACE = re.compile(r"(?:/|\$\w+|\$\{\w+\})(?:[\w./+@%=-]|\$\w+|\$\{\w+\})*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ARCHIVE = re.compile(r"\.(?:tar|tgz|tbz2|txz|sqsh|squashfs|sfs|(?:tar\.(?:gz|bz2|xz|zst|lz4)))$")


class Item(NamedTuple):
    """One thing to stage.

    Attributes:
        source: where it is: in the shared file system, or of results on the local disk.
        to: where it goes; may name variables, which each node fills in.
        name: what it is called in ``DTSLURM_STAGED_<NAME>``, in small letters.
        method: one of `METHODS`.
        shards: ``node`` or ``rank`` where each gets an even share of the files; empty where each gets all.
    """

    source: str
    to: str
    name: str
    method: str = "auto"
    shards: str = ""

    @property
    def variable(self) -> str:
        """The variable that tells the program where it lies."""
        return "DTSLURM_STAGED_" + self.name.upper()

    @property
    def text(self) -> str:
        """The item as it would be written."""
        options = ["name=" + self.name]
        options += ["method=" + self.method] if self.method != "auto" else []
        options += ["shards=" + self.shards] if self.shards else []
        return ":".join([self.source, self.to, ",".join(options)])


def parse(text: str, disk: str = "", out: bool = False) -> Item:
    """Return what a text asks for.

    Args:
        disk: the nodes' local disk, for a text that names no place.
        out: it is about results, which come from a local disk.

    Raises:
        ValueError: with the reason, for people.
    """
    source, colon, rest = text.partition(":")
    to, _, words = rest.partition(":")
    options = _options(words)
    base = os.path.basename(source.rstrip("/"))
    stem = _ARCHIVE.sub("", base)
    unpack = options.get("method") == "unpack"
    if out:
        _check_place(source, "the local folder")
        to = to if colon else base
    else:
        if not source.startswith("/"):
            raise ValueError("give the source by its full path on the cluster")
        if not to and not disk:
            raise ValueError("say where to, as SRC:DST: the profile names no local disk (local_disk.path)")
        to = to or disk.rstrip("/") + "/" + (stem if unpack else base)
        if to.endswith("/"):
            to += stem if unpack else base
        _check_place(to, "the place on the node")
    name = options.get("name") or re.sub(r"\W+", "_", stem).strip("_").lower()
    if not re.match(r"[A-Za-z_]\w*$", name):
        raise ValueError("give it a name, as in SRC:DST:name=data")
    if options.get("shards") and unpack:
        raise ValueError("an archive that is unpacked has no shards; stage a folder of several archives")
    return Item(
        source.rstrip("/") or "/", to, name.lower(), options.get("method", "auto"), options.get("shards", "")
    )


def _options(words: str) -> Dict[str, str]:
    known: Dict[str, Sequence[str]] = {"method": METHODS, "shards": SHARDS, "name": ()}
    options = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            raise ValueError("{!r} is none of method=…, shards=… and name=…".format(word))
        if known[key] and value not in known[key]:
            raise ValueError("{} is one of {}, not {!r}".format(key, ", ".join(known[key]), value))
        options[key] = value
    return options


def _check_place(path: str, what: str) -> None:
    if not _PLACE.match(path) or _PLACE.match(path).group() != path:  # type: ignore[union-attr]
        raise ValueError("{} begins with / or a variable, as in $TMPDIR/data; not {!r}".format(what, path))
    if ".." in path.split("/") or path == "/" or _VARIABLE.fullmatch(path):
        raise ValueError("{} should be a folder of its own, not {!r}".format(what, path))


def expand(path: str, environ: Dict[str, str]) -> str:
    """Return a path with its variables filled in.

    Raises:
        ValueError: one is not set.
    """

    def value(found):  # type: ignore[no-untyped-def]
        name = found.group(1) or found.group(2)
        if not environ.get(name):
            raise ValueError("${} is not set there".format(name))
        return environ[name]

    full = _VARIABLE.sub(value, path)
    if not full.startswith("/"):
        raise ValueError("{} is no full path there: {!r}".format(path, full))
    return os.path.normpath(full)


def shard(sizes: Sequence[int], shares: int) -> List[List[int]]:
    """Return the numbers of the files in each share: counts differ by one at most, bytes as little as goes.

    The larger ones are dealt first, to whoever has least and may still take one.
    """
    hands: List[List[int]] = [[] for _ in range(shares)]
    weights = [0] * shares
    most = -(-len(sizes) // shares)
    full = len(sizes) % shares or shares  # so many shares may have `most`
    for index in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        above = sum(1 for hand in hands if len(hand) == most)
        open_ones = [
            number
            for number, hand in enumerate(hands)
            if len(hand) < most - 1 or (len(hand) == most - 1 and above < full)
        ]
        chosen = min(open_ones, key=lambda number: (weights[number], len(hands[number]), number))
        hands[chosen].append(index)
        weights[chosen] += sizes[index]
    return [sorted(hand) for hand in hands]


def choose(item: Item, files: int, size: int, nodes: int, same_place: bool, sbcast: bool) -> str:
    """Return how an item is copied, by its size, its files and the nodes that lack it.

    Many small files are read from the shared file system once rather than by every node: they are packed into
    one file. One large file goes to many nodes by Slurm's tree, so that not all of them read it.
    """
    if item.method == "sbcast" and (not sbcast or not same_place or item.shards):
        return "copy" if files < 1000 else "pack"
    if item.method != "auto":
        return item.method
    if item.shards or nodes <= 1:
        return "copy"
    if files >= 1000 and size / max(1, files) < (4 << 20):
        return "pack"
    if files == 1 and size >= (64 << 20) and nodes >= 16 and same_place and sbcast:
        return "sbcast"
    return "copy"
