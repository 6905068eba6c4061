"""Sets of nodes in the notation of Slurm and ClusterShell: ``n[1-2,4]``."""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_MAX_NODES = 100_000  # a range from another machine must not exhaust the memory


def fold_nodes(nodes: object) -> str:
    """Return nodes in their shortest form; a text that is no set of nodes is unchanged.

    Args:
        nodes: names in a list, or a text such as ``n1,n2``; any other value gives an empty text.
    """
    text = ",".join(map(str, nodes)) if isinstance(nodes, list | tuple | set | frozenset) else nodes
    if not isinstance(text, str):
        return ""
    if "," not in text or sum(int(last) - int(first) for first, last in _RANGE.findall(text)) > _MAX_NODES:
        return text
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return text
