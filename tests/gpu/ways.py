"""Ways to fail on a GPU: what ``diagnose`` should name, and options of the job."""

from __future__ import annotations

WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "out-of-memory": ("gpu-out-of-memory", ()),
    "no-room-for-cublas": ("gpu-out-of-memory", ()),
    "illegal-access": ("gpu-fault", ()),
    "device-assert": ("gpu-fault", ()),
    "nan-loss": ("nan-loss", ()),
    "one-gpu-twice": ("invalid-device", ("--ntasks-per-node", "2", "-l", "torchrun")),
    "no-network": ("link-down", ("-l", "torchrun")),
    "no-such-gpu": ("invalid-device", ()),
    "hidden-gpu": ("invalid-device", ()),
}
FILL_THE_MEMORY = ("out-of-memory", "no-room-for-cublas")
