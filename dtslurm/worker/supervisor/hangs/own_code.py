"""Decides whether a rank that hangs waits in the training code itself, which is no fault of its node.

A stack alone does not show this: a rank that waits for its GPU in ``loss.item()`` has the same stack as a
rank with an endless loop in that line. Therefore only waits that Python itself makes count.
"""

import re
from typing import Any, Dict, List

_LIBRARY = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python\d|^<frozen|^<string>")
# Modules that wait for other threads, for child processes, and for the workers of a data loader.
_WAITS = re.compile(
    r"/python\d[\d.]*/(?:threading|queue|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py$"
    r"|/torch/utils/data/"
)
_SELECTORS = re.compile(r"/python\d[\d.]*/selectors\.py$")
_PEERS = re.compile(r"/torch/(?:distributed|cuda)/|/horovod/|/mpi4py/|/deepspeed/comm/|nccl")
_SLEEPS = re.compile(r"\b(?:nanosleep|select|hrtimer_nanosleep|do_select)\b")
_INNERMOST_FRAMES = 12


def waits_in_own_code(process: Dict[str, Any]) -> bool:
    """Return whether a rank sleeps, or waits for a lock, a thread, a child process or a data loader.

    An endless loop is no evidence, because a rank that waits for its GPU may also keep a core busy.

    Args:
        process: the rank's process with its stacks, as `worker.stacks.look` returns it; ``blocked`` is true
            if a process of the rank is blocked in the kernel.
    """
    threads = process.get("threads") or [{}]
    states = [process.get("state"), *(thread.get("state") for thread in threads)]
    if process.get("blocked") or process.get("state") not in ("R", "S") or "D" in states:
        return False
    files = [str(frame.get("file")) for frame in threads[0].get("frames") or []]
    depth = next((index for index, name in enumerate(files) if not _LIBRARY.search(name)), None)
    return depth is not None and _is_python_wait(threads, files[:depth])


def _is_python_wait(threads: List[Dict[str, Any]], library: List[str]) -> bool:
    """Return whether Python itself waits; ``library`` holds the files of the frames inside the own code."""
    if not library:
        return bool(_SLEEPS.search(str(threads[0].get("waits"))))
    if not _WAITS.search(library[-1]):
        return False
    if not all(_WAITS.search(name) or _SELECTORS.search(name) for name in library):
        return False
    # The thread for which the main thread waits may itself wait for other ranks or for a GPU.
    others = [frame for thread in threads[1:] for frame in (thread.get("frames") or [])[:_INNERMOST_FRAMES]]
    return not any(_PEERS.search(str(frame.get("file"))) for frame in others)
