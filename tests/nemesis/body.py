"""Training code of a schedule: ``body.py HISTORY RUN TICKS CODE...``; it commits at every tick while it may.

The lease is read and taken by the library's own code, which needs no torch if it is loaded by itself.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path


def library(path: str) -> object:
    """Return the module in a file."""
    spec = importlib.util.spec_from_file_location("run_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_files"] = module
    spec.loader.exec_module(module)
    return module


def append_event(history: str, what: str, run: str, attempt: int, **values: object) -> None:
    """Append an event of this attempt to the history, in one write."""
    job = os.environ.get("SLURM_JOB_ID", "")
    line = {"at": time.time(), "what": what, "run": run, "attempt": attempt, "job": job, **values}
    with Path(history).open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def main() -> int:
    os.environ.pop("CLOCK_SKEW", None)  # by one clock only the history can be judged
    history, run, ticks, *codes = sys.argv[1:]
    if "SLURM_ARRAY_TASK_ID" in os.environ:  # each task is a run of its own in the history
        run = f"{run}[{os.environ['SLURM_ARRAY_TASK_ID']}]"
    files = library(os.environ["RUN_FILES"]).RunFiles.of()  # type: ignore[attr-defined]

    def tell(what: str, **values: object) -> None:
        append_event(history, what, run, files.attempt, **values)

    files.take_lease()
    tell("begin", pid=os.getpid(), host=os.environ.get("SLURMD_NODENAME", ""))
    for tick in range(int(ticks)):
        print("tick", tick, flush=True)
        time.sleep(0.2)
        files.check_lease()
        tell("commit", tick=tick)
    documents = [json.loads(line) for line in Path(history).read_text().splitlines()]
    ended = sum(line["run"] == run and line["what"] == "end" for line in documents)
    code = int(codes[min(ended, len(codes) - 1)])
    tell("end", code=code)
    return code


if __name__ == "__main__":
    sys.exit(main())
