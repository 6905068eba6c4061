"""Parse the items to stage, written as ``SRC[:DST[:OPTION,...]]``, and choose how to copy them.

Pure functions.
"""

import os
import re
from typing import Dict, List, NamedTuple, Sequence

METHODS = ("auto", "copy", "pack", "sbcast", "rsync", "unpack")
SHARDS = ("node", "rank")
_PATH_PATTERN = re.compile(r"(?:/|\$\w+|\$\{\w+\})(?:[\w./+@%=-]|\$\w+|\$\{\w+\})*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ARCHIVE = re.compile(r"\.(?:tar|tgz|tbz2|txz|sqsh|squashfs|sfs|(?:tar\.(?:gz|bz2|xz|zst|lz4)))$")


class Item(NamedTuple):
    """One file or folder to stage.

    Attributes:
        source: the source path: on the shared file system, or for results on the local disk.
        to: the destination path; may contain variables, which each node expands.
        name: lower-case name, used in ``DTSLURM_STAGED_<NAME>``.
        method: one of `METHODS`.
        shards: ``node`` or ``rank`` if each gets an even share of the files; empty if each gets all files.
    """

    source: str
    to: str
    name: str
    method: str = "auto"
    shards: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that contains the item's path for the training code."""
        return "DTSLURM_STAGED_" + self.name.upper()

    @property
    def text(self) -> str:
        """The item in its written form."""
        options = ["name=" + self.name]
        options += ["method=" + self.method] if self.method != "auto" else []
        options += ["shards=" + self.shards] if self.shards else []
        return ":".join([self.source, self.to, ",".join(options)])


def parse(text: str, disk: str = "", is_stage_out: bool = False) -> Item:
    """Parse the written form of an item.

    Args:
        disk: the nodes' local disk, used if the text has no destination.
        is_stage_out: whether the item is a result, copied from a local disk.

    Raises:
        ValueError: the text is invalid; the message is for the user.
    """
    source, colon, destination_text = text.partition(":")
    to, _, options_text = destination_text.partition(":")
    options = _parse_options(options_text)
    base = os.path.basename(source.rstrip("/"))
    stem = _ARCHIVE.sub("", base)
    unpack = options.get("method") == "unpack"
    if is_stage_out:
        _check_path(source, "the local folder")
        to = to if colon else base
    else:
        if not source.startswith("/"):
            raise ValueError("give the absolute path of the source on the cluster")
        if not to and not disk:
            raise ValueError(
                "add a destination, as in SRC:DST: the profile has no local disk (local_disk.path)"
            )
        to = to or disk.rstrip("/") + "/" + (stem if unpack else base)
        if to.endswith("/"):
            to += stem if unpack else base
        _check_path(to, "the path on the node")
    name = options.get("name") or re.sub(r"\W+", "_", stem).strip("_").lower()
    if not re.match(r"[A-Za-z_]\w*$", name):
        raise ValueError("add a name, as in SRC:DST:name=data")
    if options.get("shards") and unpack:
        raise ValueError("an archive that is unpacked has no shards; stage a folder of several archives")
    return Item(
        source.rstrip("/") or "/", to, name.lower(), options.get("method", "auto"), options.get("shards", "")
    )


def _parse_options(words: str) -> Dict[str, str]:
    values_by_option: Dict[str, Sequence[str]] = {"method": METHODS, "shards": SHARDS, "name": ()}
    options = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if key not in values_by_option or not equals:
            raise ValueError("{!r} is not one of method=…, shards=… and name=…".format(word))
        if values_by_option[key] and value not in values_by_option[key]:
            raise ValueError("{} is one of {}, not {!r}".format(key, ", ".join(values_by_option[key]), value))
        options[key] = value
    return options


def _check_path(path: str, label: str) -> None:
    if not _PATH_PATTERN.match(path) or _PATH_PATTERN.match(path).group() != path:  # type: ignore[union-attr]
        raise ValueError("{} begins with / or a variable, as in $TMPDIR/data; not {!r}".format(label, path))
    if ".." in path.split("/") or path == "/" or _VARIABLE.fullmatch(path):
        raise ValueError("{} should be a folder of its own, not {!r}".format(label, path))


def expand(path: str, environ: Dict[str, str]) -> str:
    """Return a path with its variables expanded.

    Raises:
        ValueError: a variable is not set, or the expanded path is not absolute.
    """

    def replacement(match):  # type: ignore[no-untyped-def]
        name = match.group(1) or match.group(2)
        if not environ.get(name):
            raise ValueError("${} is not set there".format(name))
        return environ[name]

    expanded = _VARIABLE.sub(replacement, path)
    if not expanded.startswith("/"):
        raise ValueError("{} is not an absolute path there: {!r}".format(path, expanded))
    return os.path.normpath(expanded)


def shard(sizes: Sequence[int], shares: int) -> List[List[int]]:
    """Distribute files over shares; return the file indices of each share.

    The numbers of files per share differ by at most one, and the bytes are balanced greedily: the files are
    assigned in order of decreasing size, each to the share with the fewest bytes that may still take a file.
    """
    indices_by_share: List[List[int]] = [[] for _ in range(shares)]
    weights = [0] * shares
    max_files = -(-len(sizes) // shares)
    max_full_shares = len(sizes) % shares or shares  # number of shares that may have `max_files` files
    for index in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        full_shares = sum(1 for indices in indices_by_share if len(indices) == max_files)
        open_shares = [
            share
            for share, indices in enumerate(indices_by_share)
            if len(indices) < max_files - 1
            or (len(indices) == max_files - 1 and full_shares < max_full_shares)
        ]
        lightest = min(
            open_shares, key=lambda number: (weights[number], len(indices_by_share[number]), number)
        )
        indices_by_share[lightest].append(index)
        weights[lightest] += sizes[index]
    return [sorted(indices) for indices in indices_by_share]


def choose(item: Item, files: int, size: int, nodes: int, same_place: bool, sbcast: bool) -> str:
    """Return the copy method for an item, based on its size, its number of files and the nodes that lack it.

    Many small files are packed into one file, so that they are read from the shared file system once rather
    than by every node. One large file is sent to many nodes with sbcast, Slurm's tree broadcast, so that not
    all of them read it.
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
