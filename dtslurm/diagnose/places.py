"""Where the ranks of a running job are: what each does, and which of them are at the same place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from dtslurm.diagnose.follow_on_errors import folded
from dtslurm.model.runs.live import RankLook, StackFrame, StackGroup

BUSY = 0.5  # cores; less than that is no computing
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python\d|^<frozen|^<string>")
# Where a call ends only when other ranks have come as well: files, and functions in them.
_TOGETHER = re.compile(
    r"torch/distributed/|torch/_C/_distributed|/horovod/|/mpi4py/|deepspeed/comm/|deepspeed/runtime/pipe/"
    r"|megatron/core/pipeline_parallel/|jax/experimental/multihost_utils|jax/_src/distributed"
    r"|tensorflow/python/distribute"
    r"|torch/cuda/nccl|ray/util/collective|cupy/cuda/nccl|distributed_c10d"
)
_BACKWARD = re.compile(r"torch/autograd/")  # gradients are summed up behind it
_STORE = re.compile(r"rendezvous|TCPStore|_store_based_barrier|init_process_group|_create_c10d_store")
_DATA = re.compile(
    r"torch/utils/data/|tensorflow/python/data/|webdataset|/datasets/|grain/|nvidia/dali|/ffcv/"
)
_SYNCHRONIZE = re.compile(r"torch/cuda/(?:streams|__init__)|torch/(?:accelerator|xpu|hip)/")
_NEAR = 8  # frames from the innermost on that tell what a rank waits for


def kind_of(look: RankLook) -> str:
    """Return what a rank does, as one of the kinds of `StackGroup`."""
    if look.ended:
        return "ended"
    if not look.started:
        return "absent"
    if look.by == "none":
        return "gone"
    if not look.by:
        return "unseen"
    if look.state in ("T", "t"):
        return "stopped"
    if look.state == "D" and not look.moved:
        return "blocked"
    if look.frames:
        return _by_frames(look)
    return _alone(look)


def _by_frames(look: RankLook) -> str:
    inner = look.frames[:_NEAR]
    own = next((number for number, frame in enumerate(inner) if not _LIBRARY.search(frame.file)), len(inner))
    above = inner[:own]
    if any(_TOGETHER.search(frame.file) for frame in above) and not look.moved:
        return "waits"
    if any(_SYNCHRONIZE.search(frame.file) and "synchronize" in frame.function for frame in above):
        return "computes" if look.moved else "waits"
    if above and _BACKWARD.search(above[0].file) and look.cpu < BUSY and not look.moved:
        return "waits"
    if any(_DATA.search(frame.file) for frame in above) and look.cpu < BUSY and not look.moved:
        return "data"
    return _alone(look)


def _alone(look: RankLook) -> str:
    """Return what a rank does that waits for nobody, as far as is known."""
    if look.moved:
        return "computes"
    if look.cpu >= BUSY or look.state == "R":
        return "computes" if look.moved is None else "busy"
    return "sleeps"


def rendezvous(look: RankLook) -> bool:
    """Tell whether a rank waits for the others to come up."""
    return any(_STORE.search(frame.function) or _STORE.search(frame.file) for frame in look.frames[:_NEAR])


def own_frame(look: RankLook) -> StackFrame | None:
    """Return the innermost frame of the user's own code."""
    return next((frame for frame in look.frames if not _LIBRARY.search(frame.file)), None)


def short(path: str) -> str:
    """Return a path as people name it: a library's from its package on, others by their last two parts."""
    for mark in ("site-packages/", "dist-packages/"):
        if mark in path:
            return path.rpartition(mark)[2]
    library = re.search(r"/lib(?:64)?/python\d[\d.]*/(.+)$", path)
    return library[1] if library else "/".join(path.split("/")[-2:])


def at(frame: StackFrame) -> str:
    """Return a frame in words: ``load (data/loader.py:88)``."""
    place = f"{short(frame.file)}:{frame.line or '?'}"
    return place if frame.function == "<module>" else f"{frame.function} ({place})"


_VERBS = {
    "waits": "in",
    "data": "waiting for its data, in",
    "stopped": "stopped (by a signal or a debugger) in",
    "blocked": "waiting for a device or file system in",
    "computes": "computing in",
    "busy": "busy at one place, in",
    "sleeps": "sleeping in",
}
_WITHOUT = {
    "stopped": "stopped by a signal or a debugger",
    "blocked": "waiting for a device or file system",
    "gone": "not running any more, though there is no record of an end",
    "absent": "not started",
    "ended": "ended",
    "computes": "computing",
    "busy": "busy",
    "sleeps": "sleeping",
    "unseen": "not looked at",
}


def words(look: RankLook, kind: str) -> str:
    """Return where a rank is: ``in all_reduce (…), called by step (train.py:31)``."""
    if not look.frames or kind in ("gone", "absent", "ended", "unseen"):
        said = _WITHOUT.get(kind, kind)
        if kind == "ended" and look.exit_code is not None:
            said += f" with exit code {look.exit_code}"
        return f"{said}: {_plain(look.waits)}" if look.waits and kind in ("blocked", "sleeps") else said
    top = look.frames[0]
    own = own_frame(look)
    said = f"{_VERBS[kind]} {at(top)}"
    if own is not None and own is not top:
        said += f", called {'at' if own.function == '<module>' else 'by'} {at(own)}"
    return f"{said}: {_plain(look.waits)}" if look.waits and kind == "blocked" else said


def _plain(waits: str) -> str:
    """Return what the kernel says without the numbers that differ from rank to rank."""
    return re.sub(r"\b(socket|pipe|anon_inode):\[[^\]]*\]", r"a \1", waits)


def places(looks: Sequence[RankLook]) -> tuple[StackGroup, ...]:
    """Return the ranks by the place they are at, the largest group first."""
    groups: dict[tuple[str, str], list[RankLook]] = defaultdict(list)
    for look in looks:
        kind = kind_of(look)
        groups[kind, words(look, kind)].append(look)
    found = [
        StackGroup(
            kind=kind,
            what=what,
            ranks=folded(look.rank for look in members),
            count=len(members),
            example=min(members, key=lambda look: look.rank).rank,
            frames=min(members, key=lambda look: look.rank).frames,
        )
        for (kind, what), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda place: (-place.count, place.example)))
