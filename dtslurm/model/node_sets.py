"""Sets of nodes in one notation: ``n[1-2,4]``, as Slurm and ClusterShell write them."""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_MOST_NODES = 100_000  # a text that another machine sends must not fill the memory


def fold_nodes(nodes: object) -> str:
    """Return nodes in their shortest form; a text that is no set of nodes stays as it is.

    Args:
        nodes: names in a list, or a text such as ``n1,n2``; anything else gives an empty text.
    """
    text = ",".join(map(str, nodes)) if isinstance(nodes, list | tuple | set | frozenset) else nodes
    if not isinstance(text, str):
        return ""
    if "," not in text or sum(int(last) - int(first) for first, last in _RANGE.findall(text)) > _MOST_NODES:
        return text
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return text
