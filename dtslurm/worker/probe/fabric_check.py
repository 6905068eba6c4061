"""Measures the network between all ranks of a job with torch; ends with 86 and a message if it is too slow.

Arguments: RESULT (JSON file to write), EXPECTED (GB/s of bus bandwidth, 0 if unknown), FABRIC (what NCCL must
use instead of TCP, or "any"), and optionally the seconds to measure and the seconds for the rendezvous.
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

ADVICE = "check NCCL_SOCKET_IFNAME, the nodes' network adapters, and the log lines next to this one"


def fail(message: str) -> None:
    """End at once, with a single line for the job's output."""
    print("fabric check failed: " + message, flush=True)
    os._exit(86)  # threads that wait for the network would block a normal exit


def main(path: str, expected_gbs: float, fabric: str, limit: float = 30, wait: float = 180) -> None:
    """Measure the bandwidth; rank 0 writes the result, and ends the job's step if the network is too slow."""
    for name, slurm in [("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")]:
        os.environ[name] = os.environ.get("SLURM_" + slurm) or os.environ[name]
    with tempfile.NamedTemporaryFile("r") as log:  # NCCL logs which network it uses
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log.name)
        import torch.distributed as dist

        message = (
            "it did not end within {:g} s: ranks did not find each other, or an all-reduce hangs".format(
                wait + 2 * limit
            )
        )
        guard = threading.Timer(wait + 2 * limit, fail, [message + "; " + ADVICE])
        guard.daemon = True
        guard.start()
        backend, busbw, ring_gbs = measure(limit, wait)
        network_lines = [
            line.split("NCCL INFO ")[-1].strip() for line in log if "NET/" in line or "network" in line
        ]
    hosts_and_tcp: List[Any] = [None] * len(ring_gbs)
    dist.all_gather_object(
        hosts_and_tcp, (socket.gethostname(), any("via NET/Socket" in line for line in network_lines))
    )
    guard.cancel()
    dist.destroy_process_group()
    if os.environ["RANK"] != "0":
        return
    print("\n".join(dict.fromkeys(network_lines[:40])), "\nbus bandwidth in GB/s by bytes:", busbw)
    best_busbw, slowest = max(busbw.values()), ring_gbs.index(min(ring_gbs))
    slowest_text = "rank {} on {} has {:.3g} GB/s to its neighbors, the least; the median is {:.3g}".format(
        slowest, hosts_and_tcp[slowest][0], ring_gbs[slowest], sorted(ring_gbs)[len(ring_gbs) // 2]
    )
    tcp_hosts, problem = sorted({host for host, uses_tcp in hosts_and_tcp if uses_tcp}), None
    if fabric != "any" and tcp_hosts:
        problem = "NCCL uses TCP (NET/Socket) on {} instead of {}; check NCCL's plugin and the driver there"
        problem = problem.format(", ".join(tcp_hosts[:8]), fabric)
    elif best_busbw < expected_gbs / 2:
        problem = "{:.3g} GB/s by {}, less than half of the {:g} expected; {}; {}"
        problem = problem.format(best_busbw, backend, expected_gbs, slowest_text, ADVICE)
    report = {
        "schema": 1,
        "backend": backend,
        "busbw_gbs": best_busbw,
        "expected_gbs": expected_gbs,
        "sizes": busbw,
    }
    report.update(
        problem=problem, slowest_rank=slowest, ring_gbs=ring_gbs, hosts=[host for host, _ in hosts_and_tcp]
    )
    with open(path, "w") as file:
        json.dump(report, file)
    if problem:
        fail(problem)
    print(
        "fabric check: {:.3g} GB/s over {} ranks by {}; {}".format(
            best_busbw, len(ring_gbs), backend, slowest_text
        )
    )


def measure(limit: float, wait: float) -> Tuple[str, Dict[int, float], List[float]]:
    """Return the backend, the bus bandwidth by bytes, and each rank's GB/s with its neighbors in a ring."""
    import torch
    import torch.distributed as dist

    backend, device, finish = "gloo", "cpu", time.monotonic  # work on a CPU is synchronous
    if torch.cuda.is_available():  # Slurm exposes to a rank all GPUs of its node, or only its own
        backend, device, finish = "nccl", "cuda", torch.cuda.synchronize
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=wait + 4 * limit))
    rank, world = dist.get_rank(), dist.get_world_size()

    def timed(run: Callable[..., Any], *arguments: Any) -> List[float]:
        start = time.monotonic()
        run(*arguments)
        finish()
        seconds = [torch.zeros(1, device=device) for _ in range(world)]
        dist.all_gather(seconds, torch.tensor([time.monotonic() - start], device=device))
        return [float(tensor) for tensor in seconds]  # each rank's seconds, the same list on all ranks

    def all_reduce(data: Any, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(data)

    def exchange(data: Any, received: Any) -> None:
        next_rank, previous_rank = (rank + 1) % world, (rank - 1) % world
        operations = [
            dist.P2POp(dist.isend, data, next_rank),
            dist.P2POp(dist.irecv, received, previous_rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    timed(all_reduce, torch.zeros(1, device=device), 1)  # opens the connections, so that no measurement does
    busbw, spent_s, last_s = {}, 0.0, 0.0
    for size in [4**n << 20 for n in range(3 if device == "cpu" else 6)]:  # 1 MiB to 16 MiB, or to 1 GiB
        if spent_s + 4 * last_s < limit:
            data = torch.zeros(size // 4, device=device)
            first_s = max(timed(all_reduce, data, 1))
            times = max(1, min(20, int((limit - spent_s) / 6 / first_s)))
            last_s = max(timed(all_reduce, data, times)) / times
            spent_s += first_s + last_s * times
            busbw[size] = 2 * (world - 1) / world * size / last_s / 1e9
    # In an all-reduce all ranks wait for the slowest; in a ring each waits for its two neighbors only.
    data = torch.zeros(1 << 22, device=device)  # 16 MiB
    timed(exchange, data, torch.zeros_like(data))  # opens the connections of the ring
    return (
        backend,
        busbw,
        [(1 << 24) / seconds / 1e9 for seconds in timed(exchange, data, torch.zeros_like(data))],
    )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:]))
