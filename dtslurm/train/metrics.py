"""Lines of ``$DTSLURM_METRICS``, written beside training rather than in its way."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dtslurm.train.run_files import append, plain


class Metrics:
    """Appends one JSON object per line, from a thread: a value that lies on a GPU is waited for there.

    Args:
        path: the file, None to write nothing.
        rank: whose values these are.
    """

    def __init__(self, path: Path | None, rank: int = 0) -> None:
        self._path, self._rank = path, rank
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, values: dict[str, Any]) -> None:
        """Have a line written; tensors of one element become numbers. Returns at once."""
        if self._path is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=[self._path], name="metrics", daemon=True)
            self._thread.start()
        self._lines.put({"time": round(time.time(), 3), "rank": self._rank, **without_graph(values)})

    def close(self, timeout: float = 10.0) -> None:
        """Wait until what was given is written, for so many seconds at most."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self, path: Path) -> None:
        while (values := self._lines.get()) is not None:
            told = {key: plain(value) for key, value in values.items()}
            append(path, json.dumps(told, default=str, skipkeys=True) + "\n")


def without_graph(values: dict[str, Any]) -> dict[str, Any]:
    """Return values whose tensors hold on to no graph."""
    return {key: v.detach() if isinstance(v, torch.Tensor) else v for key, v in values.items()}
