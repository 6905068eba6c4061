"""Many small files to four nodes: by `--stage`, and by tar and sbcast as written by hand.

``python -m benchmarks.staging [MB] [FILES]`` (2000 and 20000) brings a Slurm of four nodes up on this
machine, each with a folder of its own as local disk, and runs both ways in turn as jobs. All nodes share this
machine's disk and processors, so the ratio tells, not the seconds. Both end with all files on all nodes; ours
has compared checksums too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.cluster import SlurmLab

ROUNDS = 3
BY_HAND = """\
#!/bin/bash
#SBATCH -N 4 --ntasks-per-node=1 -o /dev/null
began=$(date +%s%N)
tar -C {source} -cf {root}/hand.tar . || exit
sbcast --force {root}/hand.tar {local}/hand.tar || exit
cat >{root}/unpack.sh <<'END'
mkdir {local}/data && tar -C {local}/data -xf {local}/hand.tar && rm {local}/hand.tar
END
srun --ntasks-per-node=1 bash {root}/unpack.sh || exit
rm {root}/hand.tar
echo $(($(date +%s%N) - began)) >{root}/hand.ns
"""
TRAIN = "import os; print(os.environ['DTSLURM_STAGED_DATA'])\n"


def fill(folder: Path, megabytes: int, count: int) -> None:
    """Write files that do not compress, a hundred to a folder."""
    dice = random.Random(0)
    block = dice.randbytes(1 << 20)
    size = megabytes * 1_000_000 // count
    for number in range(count):
        place = folder / f"{number // 100:04}"
        place.mkdir(parents=True, exist_ok=True)
        first = dice.randrange(len(block) - size) if size < len(block) else 0
        (place / f"{number:06}.jpg").write_bytes((block * (1 + size // len(block)))[first : first + size])


def empty(lab: SlurmLab, count: int) -> None:
    """Remove what a round left on the nodes' disks, having seen that it is all there."""
    for disk in sorted((lab.root / "disks").iterdir()):
        there = sum(len(names) for _, _, names in os.walk(disk / "data"))
        assert there == count, f"{disk}: {there} files"
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["sync"], check=True)


def by_hand(lab: SlurmLab, source: Path) -> float:
    """Return the seconds that the hand-written way takes."""
    script = lab.root / "hand.sh"
    script.write_text(BY_HAND.format(source=source, root=lab.root, local=lab.root / "local"))
    took = lab.root / "hand.ns"
    took.unlink(missing_ok=True)
    lab.run(["sbatch", script])
    lab.wait_for("the job", lambda: took.exists() and took.read_text().endswith("\n"), 600)
    return int(took.read_text()) / 1e9


def ours(lab: SlurmLab, source: Path, folder: Path) -> float:
    """Return the seconds that `--stage` takes, from the script's call to its last word."""
    (folder / "train.py").write_text(TRAIN)
    env = lab.environ({"DTSLURM_RUN_ROOT": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state")})
    words = ["submit", "--cluster", "slurm", "-N", "4", "-l", "srun", "-t", "30", "--wait", "--json"]
    words += ["--stage", f"{source}:{lab.root / 'local' / 'data'}", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "dtslurm", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["run"]["run_dir"])
    began = [
        e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == "staged"
    ]
    return float(began[0]["seconds"])


def main() -> None:
    """Measure and print."""
    megabytes, count = (int(word) for word in (*sys.argv[1:], *("2000", "20000")[len(sys.argv) - 1 :]))
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    folder = Path(tempfile.mkdtemp(prefix="dtslurm-staging-", dir="/tmp"))
    try:
        fill(folder / "data", megabytes, count)
        disks = dict.fromkeys(["n1", "n2", "n3", "n4"])
        times: dict[str, list[float]] = {"by hand": [], "--stage": []}
        with SlurmLab(root, gpus=0, disks=disks) as lab:
            for _ in range(ROUNDS if megabytes < 1000 else 1):
                times["by hand"].append(by_hand(lab, folder / "data"))
                empty(lab, count)
                times["--stage"].append(ours(lab, folder / "data", folder))
                empty(lab, count)
        for name, seconds in times.items():
            print(f"{name:8} {statistics.median(seconds):6.1f} s  ({', '.join(f'{s:.1f}' for s in seconds)})")
        ratio = statistics.median(times["by hand"]) / statistics.median(times["--stage"])
        print(f"{megabytes} MB in {count} files to 4 nodes: {ratio:.2f} x the speed of tar and sbcast")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"took {time.monotonic() - began:.0f} s")
