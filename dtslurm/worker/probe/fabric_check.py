"""Measures the network between all ranks of a job with torch; ends with 86, and says why, if it is bad.

Arguments: RESULT (JSON file to write), EXPECTED (GB/s of bus bandwidth, 0 if unknown), FABRIC (what NCCL must
use rather than TCP, or "any"), and if they are to differ, seconds to measure and for the ranks to meet.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, Tuple

LOOK = "look at NCCL_SOCKET_IFNAME, at the nodes' network adapters, and at the lines beside this one"


def fail(message: str) -> None:
    """End at once, with the one line that the job's own output will show."""
    print("fabric check failed: " + message, flush=True)
    os._exit(86)  # threads that wait for the network would not let us end


def main(path: str, expected: float, fabric: str, limit: float = 30, wait: float = 180) -> None:
    """Measure, and judge on rank 0."""
    for name, slurm in [("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")]:
        os.environ[name] = os.environ.get("SLURM_" + slurm) or os.environ[name]
    with tempfile.NamedTemporaryFile("r") as log:  # NCCL writes there which network it takes
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log.name)
        import torch.distributed as dist

        hung = "no end after {:g} s: ranks did not meet, or an all-reduce hangs".format(wait + 2 * limit)
        guard = threading.Timer(wait + 2 * limit, fail, [hung + "; " + LOOK])
        guard.daemon = True
        guard.start()
        backend, busbw, ring = measure(limit, wait)
        net = [line.split("NCCL INFO ")[-1].strip() for line in log if "NET/" in line or "network" in line]
    about: List[Any] = [None] * len(ring)
    dist.all_gather_object(about, (socket.gethostname(), any("via NET/Socket" in line for line in net)))
    guard.cancel()
    dist.destroy_process_group()
    if os.environ["RANK"] != "0":
        return
    print("\n".join(dict.fromkeys(net[:40])), "\nbus bandwidth in GB/s by bytes:", busbw)
    best, slow = max(busbw.values()), ring.index(min(ring))
    where = "rank {} on {} has {:.3g} GB/s to its neighbours, the least; the median is {:.3g}".format(
        slow, about[slow][0], ring[slow], sorted(ring)[len(ring) // 2]
    )
    tcp, problem = sorted({host for host, sockets in about if sockets}), None
    if fabric != "any" and tcp:
        problem = "NCCL goes over TCP (NET/Socket) on {}, not over {}; look there at its plugin and driver"
        problem = problem.format(", ".join(tcp[:8]), fabric)
    elif best < expected / 2:
        problem = "{:.3g} GB/s by {}, less than half of the {:g} expected; {}; {}"
        problem = problem.format(best, backend, expected, where, LOOK)
    result = {"schema": 1, "backend": backend, "busbw_gbs": best, "expected_gbs": expected, "sizes": busbw}
    result.update(problem=problem, slowest_rank=slow, ring_gbs=ring, hosts=[host for host, _ in about])
    with open(path, "w") as file:
        json.dump(result, file)
    if problem:
        fail(problem)
    print("fabric check: {:.3g} GB/s over {} ranks by {}; {}".format(best, len(ring), backend, where))


def measure(limit: float, wait: float) -> Tuple[str, Dict[int, float], List[float]]:
    """Return the backend, the bus bandwidth by bytes, and each rank's GB/s with its neighbours in a ring."""
    import torch
    import torch.distributed as dist

    backend, device, finish = "gloo", "cpu", time.monotonic  # nothing to wait for on a CPU
    if torch.cuda.is_available():  # Slurm shows a rank all GPUs of its node, or its own alone
        backend, device, finish = "nccl", "cuda", torch.cuda.synchronize
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=wait + 4 * limit))
    rank, world = dist.get_rank(), dist.get_world_size()

    def timed(run: Callable[..., Any], *arguments: Any) -> List[float]:
        start = time.monotonic()
        run(*arguments)
        finish()
        every = [torch.zeros(1, device=device) for _ in range(world)]
        dist.all_gather(every, torch.tensor([time.monotonic() - start], device=device))
        return [float(one) for one in every]  # each rank's seconds, the same list on all ranks

    def reduce(data: Any, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(data)

    def exchange(data: Any, came: Any) -> None:
        after, before = (rank + 1) % world, (rank - 1) % world
        both = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, came, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    timed(reduce, torch.zeros(1, device=device), 1)  # connects
    busbw, spent, last = {}, 0.0, 0.0
    for size in [4**n << 20 for n in range(3 if device == "cpu" else 6)]:  # 1 MiB to 16 MiB, or to 1 GiB
        if spent + 4 * last < limit:
            data = torch.zeros(size // 4, device=device)
            first = max(timed(reduce, data, 1))
            times = max(1, min(20, int((limit - spent) / 6 / first)))
            last = max(timed(reduce, data, times)) / times
            spent += first + last * times
            busbw[size] = 2 * (world - 1) / world * size / last / 1e9
    # In an all-reduce all ranks wait for the slowest; in a ring each waits for its two neighbours only.
    data = torch.zeros(1 << 22, device=device)
    timed(exchange, data, torch.zeros_like(data))  # connects
    return backend, busbw, [(1 << 24) / t / 1e9 for t in timed(exchange, data, torch.zeros_like(data))]


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:]))
