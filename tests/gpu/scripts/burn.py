"""``burn.py SECONDS GIB``: hold that much of the GPU's memory and multiply matrices for that long."""

from __future__ import annotations

import sys
import time

import torch

seconds, gib = float(sys.argv[1]), int(sys.argv[2])
held = torch.zeros(gib << 30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(a)
torch.mm(a, a, out=out)
torch.cuda.synchronize()
count, started = 0, time.perf_counter()
while time.perf_counter() - started < seconds:
    for _ in range(50):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    count += 50
rate = 2 * 8192**3 * count / (time.perf_counter() - started) / 1e12
print(f"TFLOP/s {rate:.1f}", flush=True)
