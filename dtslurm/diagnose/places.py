"""Where the ranks of a running job are: what each rank does, and which ranks are at the same place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from dtslurm.diagnose.follow_on_errors import format_ranges
from dtslurm.model.runs.live import RankLook, StackFrame, StackGroup
from dtslurm.worker.lib.wait_words import describe_wait

BUSY = 0.5  # cores; a rank that uses less does not compute
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python\d|^<frozen|^<string>")
# Files (and functions in them) whose calls return only after other ranks have made the same call.
_COLLECTIVE = re.compile(
    r"torch/distributed/|torch/_C/_distributed|/horovod/|/mpi4py/|deepspeed/comm/|deepspeed/runtime/pipe/"
    r"|megatron/core/pipeline_parallel/|jax/experimental/multihost_utils|jax/_src/distributed"
    r"|tensorflow/python/distribute"
    r"|torch/cuda/nccl|ray/util/collective|cupy/cuda/nccl|distributed_c10d"
)
_BACKWARD = re.compile(r"torch/autograd/")  # the gradients are all-reduced after it
_RENDEZVOUS = re.compile(r"rendezvous|TCPStore|_store_based_barrier|init_process_group|_create_c10d_store")
_DATA_LOADING = re.compile(
    r"torch/utils/data/|tensorflow/python/data/|webdataset|/datasets/|grain/|nvidia/dali|/ffcv/"
)
_EXTENSION_LOCK = re.compile(r"torch/utils/file_baton\.py$")  # its only function that takes time waits
_EXTENSION_BUILD = re.compile(r"^(?:_run_ninja_build|_write_ninja_file_and_build_library)$")
_SYNCHRONIZE = re.compile(r"torch/cuda/(?:streams|__init__)|torch/(?:accelerator|xpu|hip)/")
_INNERMOST_FRAMES = 8  # the innermost frames, which show what a rank waits for


def kind_of(look: RankLook) -> str:
    """Return what a rank does, as a kind of `StackGroup`."""
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
        return _kind_by_frames(look)
    return _kind_by_activity(look)


def _kind_by_frames(look: RankLook) -> str:
    inner_frames = look.frames[:_INNERMOST_FRAMES]
    own_index = next(
        (number for number, frame in enumerate(inner_frames) if is_own(frame)),
        len(inner_frames),
    )
    library_frames = inner_frames[:own_index]
    # Before collectives: DeepSpeed builds its extensions while it creates the process group.
    if any(_EXTENSION_LOCK.search(frame.file) for frame in library_frames):
        return "locked"
    if any(is_extension_build(frame) for frame in library_frames):
        return "builds"
    if any(is_collective(frame) for frame in library_frames) and not look.moved:
        return "waits"
    if any(_SYNCHRONIZE.search(frame.file) and "synchronize" in frame.function for frame in library_frames):
        return "computes" if look.moved else "waits"
    if library_frames and _BACKWARD.search(library_frames[0].file) and look.cpu < BUSY and not look.moved:
        return "waits"
    if any(is_data_loading(frame) for frame in library_frames) and look.cpu < BUSY and not look.moved:
        return "data"
    return _kind_by_activity(look)


def _kind_by_activity(look: RankLook) -> str:
    """Return what a rank does that, as far as is known, does not wait for others."""
    if look.moved:
        return "computes"
    if look.cpu >= BUSY or look.state == "R":
        return "computes" if look.moved is None else "busy"
    return "sleeps"


def rendezvous(look: RankLook) -> bool:
    """Return whether a rank waits for the others to start."""
    return any(
        _RENDEZVOUS.search(frame.function) or _RENDEZVOUS.search(frame.file)
        for frame in look.frames[:_INNERMOST_FRAMES]
    )


def own_frame(look: RankLook) -> StackFrame | None:
    """Return the innermost frame of the user's own code, or None."""
    return next((frame for frame in look.frames if is_own(frame)), None)


def is_own(frame: StackFrame) -> bool:
    """Return whether a frame is of the user's own code."""
    return not _LIBRARY.search(frame.file)


def is_collective(frame: StackFrame) -> bool:
    """Return whether a frame is of a call that returns only after other ranks have made the same call."""
    return bool(_COLLECTIVE.search(frame.file))


def is_extension_build(frame: StackFrame) -> bool:
    """Return whether a frame is of PyTorch's build of a C++ extension."""
    return frame.file.endswith("torch/utils/cpp_extension.py") and bool(
        _EXTENSION_BUILD.search(frame.function)
    )


def is_data_loading(frame: StackFrame) -> bool:
    """Return whether a frame is of a library that loads data."""
    return not is_own(frame) and bool(_DATA_LOADING.search(frame.file))


def short(path: str) -> str:
    """Return a short form of a path: from the package on for libraries, otherwise the last two parts."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    match = re.search(r"/lib(?:64)?/python\d[\d.]*/(.+)$", path)
    return match[1] if match else "/".join(path.split("/")[-2:])


def format_frame(frame: StackFrame) -> str:
    """Return a frame in words: ``load (data/loader.py:88)``."""
    location = f"{short(frame.file)}:{frame.line or '?'}"
    return location if frame.function == "<module>" else f"{frame.function} ({location})"


_VERBS = {
    "waits": "in",
    "data": "waiting for its data, in",
    "locked": "waiting for the lock of another build of a C++ extension, in",
    "builds": "building a C++ extension in",
    "stopped": "stopped (by a signal or a debugger) in",
    "blocked": "waiting for a device or file system in",
    "computes": "computing in",
    "busy": "busy at one place, in",
    "sleeps": "sleeping in",
}
_WORDS_WITHOUT_FRAMES = {
    "stopped": "stopped by a signal or a debugger",
    "blocked": "waiting for a device or file system",
    "gone": "no longer running, but without a recorded end",
    "absent": "not started",
    "ended": "ended",
    "computes": "computing",
    "busy": "busy",
    "sleeps": "sleeping",
    "unseen": "not examined",
}


def words(look: RankLook, kind: str) -> str:
    """Return where a rank is: ``in all_reduce (…), called by step (train.py:31)``."""
    if not look.frames or kind in ("gone", "absent", "ended", "unseen"):
        description = _WORDS_WITHOUT_FRAMES.get(kind, kind)
        if kind == "ended" and look.exit_code is not None:
            description += f" with exit code {look.exit_code}"
        if kind == "sleeps":
            return describe_wait(look.waits) or description
        return _add_wait(description, look) if kind == "blocked" else description
    innermost = look.frames[0]
    user_frame = own_frame(look)
    description = f"{_VERBS[kind]} {format_frame(innermost)}"
    if user_frame is not None and user_frame is not innermost:
        description += (
            f", called {'at' if user_frame.function == '<module>' else 'by'} {format_frame(user_frame)}"
        )
    return _add_wait(description, look) if kind == "blocked" else description


def _add_wait(description: str, look: RankLook) -> str:
    """Return the description of a blocked rank with what the rank waits for, if that is known."""
    wait = describe_wait(look.waits)
    return f"{description}: {wait}" if wait else description


def places(looks: Sequence[RankLook]) -> tuple[StackGroup, ...]:
    """Group the ranks by the place they are at, the largest group first."""
    looks_by_location: dict[tuple[str, str], list[RankLook]] = defaultdict(list)
    for look in looks:
        kind = kind_of(look)
        looks_by_location[kind, words(look, kind)].append(look)
    groups = [
        StackGroup(
            kind=kind,
            what=what,
            ranks=format_ranges(look.rank for look in members),
            count=len(members),
            example=min(members, key=lambda look: look.rank).rank,
            frames=min(members, key=lambda look: look.rank).frames,
        )
        for (kind, what), members in looks_by_location.items()
    ]
    return tuple(sorted(groups, key=lambda place: (-place.count, place.example)))
