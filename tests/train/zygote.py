"""Starts ranks fast: a process that has torch loaded forks them, by orders that are lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it, which takes longer than most trainings here
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

from tests.train.programs import PROGRAMS
from tests.warm import keep_coverage


def main() -> None:
    torch.set_num_threads(1)
    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        pids = [start(order, rank) for rank in range(len(order["envs"]))]
        answer({"pids": pids})
        ended = dict(os.waitpid(-1, 0) for _ in pids)
        answer({"codes": [os.waitstatus_to_exitcode(ended[pid]) for pid in pids]})


def start(order: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(order["envs"][rank])
        log = os.open(f"{order['out']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(0)
        PROGRAMS[order["program"]](order["out"], **order["args"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    keep_coverage()
    os._exit(code)


def answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


main()
