"""Writer of ``$DTSLURM_METRICS``, in a thread of its own so that training does not wait."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dtslurm.train.run_files import append, to_json_value


class Metrics:
    """Appends one JSON object per line from a thread, which waits for values that are on a GPU.

    Args:
        path: the metrics file, None to write nothing.
        rank: the rank that the values belong to.
    """

    def __init__(self, path: Path | None, rank: int = 0) -> None:
        self._path, self._rank = path, rank
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, values: dict[str, Any]) -> None:
        """Queue a line for writing and return at once; tensors of one element become numbers."""
        if self._path is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=[self._path], name="metrics", daemon=True)
            self._thread.start()
        self._lines.put({"time": round(time.time(), 3), "rank": self._rank, **without_graph(values)})

    def close(self, timeout: float = 10.0) -> None:
        """Wait at most ``timeout`` seconds until all queued lines are written."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self, path: Path) -> None:
        while (values := self._lines.get()) is not None:
            json_values = {key: to_json_value(value) for key, value in values.items()}
            append(path, json.dumps(json_values, default=str, skipkeys=True) + "\n")


def without_graph(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with their tensors detached from the autograd graph."""
    return {
        key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()
    }
