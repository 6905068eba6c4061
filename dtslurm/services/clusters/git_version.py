"""Finds the git commit of this dtslurm if it runs from a git checkout."""

from __future__ import annotations

from pathlib import Path

import dtslurm
from dtslurm.errors import DtslurmError
from dtslurm.store.git_tree import GitTree
from dtslurm.transport.local import LocalTransport


def state_of_checkout() -> str:
    """Return the commit as a text to append to the version; empty if there is no checkout or git fails."""
    folder = Path(dtslurm.__file__).parents[1]
    try:
        tree = GitTree.around(LocalTransport(), folder)
        state = tree.state() if tree and tree.root == folder else None
    except DtslurmError:
        return ""
    if state is None or state.commit is None:
        return ""
    return f" (commit {state.commit[:10]}{', changed since' if state.dirty else ''})"
