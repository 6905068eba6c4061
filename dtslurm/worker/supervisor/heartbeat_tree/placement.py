"""The tree of nodes through which heartbeats are sent; its root is the supervisor."""

import heapq
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

Address = Tuple[str, int]


class Member(NamedTuple):
    """A node of the tree.

    Attributes:
        address: where it accepts the connections of its children.
        number: grows with each placement; a node that is placed again has a new number and no children.
        depth: 1 for the children of the supervisor.
        parent: the node that it sends to, None for the supervisor.
        parent_number: the parent's number when this node was placed.
    """

    address: Address
    number: int
    depth: int
    parent: Optional[str]
    parent_number: int


class HeartbeatTree:
    """The tree of an attempt's nodes. It is filled level by level, so that it stays as flat as possible.

    A node that loses its parent closes the connections of its own children. It is placed again, as they are.
    """

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.members: Dict[str, Member] = {}
        self._children: Dict[Optional[str], int] = {None: 0}
        self._open: List[Tuple[int, int, str]] = []  # depth, number and name of nodes that take children
        self._failed: Set[str] = set()
        self._numbers = 0

    def place(self, node: str, address: Address, failed: str = "") -> Optional[str]:
        """Place a node, and return its parent; None if that is the supervisor.

        Args:
            failed: the parent that the node could not reach. It gets no children until it is placed again.
        """
        self.remove(node)
        self._failed.discard(node)
        if failed:
            self._failed.add(failed)
        parent = self._find_parent()
        self._children[parent] = self._children.get(parent, 0) + 1
        self._numbers += 1
        above = self.members[parent] if parent is not None else None
        depth, parent_number = (above.depth + 1, above.number) if above else (1, 0)
        self.members[node] = Member(address, self._numbers, depth, parent, parent_number)
        self._children[node] = 0
        heapq.heappush(self._open, (depth, self._numbers, node))
        return parent

    def remove(self, node: str) -> None:
        """Remove a node that is about to be placed again, or that is gone."""
        member = self.members.pop(node, None)
        if member is None:
            return
        parent = member.parent
        if parent is None:
            self._children[None] -= 1
        elif parent in self.members and self.members[parent].number == member.parent_number:
            self._children[parent] -= 1
            if self._children[parent] == self.fan_out - 1 and parent not in self._failed:
                heapq.heappush(self._open, (self.members[parent].depth, member.parent_number, parent))

    def _find_parent(self) -> Optional[str]:
        if self._children[None] < self.fan_out:
            return None
        while self._open:
            _, number, node = self._open[0]
            is_current = node in self.members and self.members[node].number == number
            if is_current and node not in self._failed and self._children[node] < self.fan_out:
                return node
            heapq.heappop(self._open)
        return None

    def parent_of(self, node: str) -> Optional[str]:
        """Return the node that a node sends to, None for the supervisor or an unknown node."""
        member = self.members.get(node)
        return member.parent if member else None
