"""NVIDIA's Nsight Systems from Debian's non-free packages, unpacked once into the user's cache.

``nsys`` needs no GPU to observe NVTX ranges, to write reports, and to export them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tests.frameworks.envs import CACHE
from tests.lab.suites import own_apt, run

SUITE = "bookworm"  # the last release with these packages
PACKAGES = ("nsight-systems", "nsight-systems-target", "libssh-4")


def find_nsys() -> Path:
    """Return the folder with the program nsys, unpacking it if need be."""
    folder = CACHE / f"nsys-{SUITE}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(folder)
    return folder / "bin"


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        scratch, root = Path(name), Path(name) / "root"
        apt = own_apt(SUITE, scratch, "main non-free")
        run([*apt, "update"])
        downloads = scratch / "downloads"
        downloads.mkdir()
        run(["env", "-C", str(downloads), *apt, "download", *PACKAGES])
        for deb in downloads.glob("*.deb"):
            run(["dpkg-deb", "-x", str(deb), str(root)])
        # nsys looks for its importer beside its own folder, which Debian's packages keep elsewhere.
        target = next(root.glob("usr/lib/*/nsight-systems/target-linux-x64"))
        host = root / "usr/lib/nsight-systems/host-linux-x64"
        shutil.rmtree(host / "Plugins")  # of the graphical program, half of all
        (target.parent / "host-linux-x64").symlink_to(os.path.relpath(host, target.parent))
        (root / "bin").mkdir()
        (root / "bin/nsys").symlink_to(os.path.relpath(target / "nsys", root / "bin"))
        root.rename(folder)
