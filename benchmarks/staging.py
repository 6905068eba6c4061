"""The time to copy 20,000 files (2 GB) to the local disks of four nodes, beside a script with tar and sbcast.

The benchmark starts a Slurm with four nodes on this machine, each with a separate folder as its local disk.
It runs a job with `--stage` and a job with a hand-written script alternately; both copy all files to all
nodes, and dtslurm also compares checksums. All nodes share the disk and the CPUs of this machine, so only the
ratio is meaningful. With 1 GB or more, each method runs once, else three times.

Run it with ``python -m benchmarks.staging [MB] [FILES]``.
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
    """Write files that cannot be compressed, a hundred in each folder."""
    generator = random.Random(0)
    block = generator.randbytes(1 << 20)
    size = megabytes * 1_000_000 // count
    for number in range(count):
        subfolder = folder / f"{number // 100:04}"
        subfolder.mkdir(parents=True, exist_ok=True)
        first = generator.randrange(len(block) - size) if size < len(block) else 0
        (subfolder / f"{number:06}.jpg").write_bytes((block * (1 + size // len(block)))[first : first + size])


def clear_disks(lab: SlurmLab, count: int) -> None:
    """Check that all files are on the disks of all nodes, and remove them."""
    for disk in sorted((lab.root / "disks").iterdir()):
        copied = sum(len(names) for _, _, names in os.walk(disk / "data"))
        assert copied == count, f"{disk}: {copied} files"
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["sync"], check=True)


def stage_by_hand(lab: SlurmLab, source: Path) -> float:
    """Return the seconds that the hand-written script takes."""
    script = lab.root / "hand.sh"
    script.write_text(BY_HAND.format(source=source, root=lab.root, local=lab.root / "local"))
    duration = lab.root / "hand.ns"
    duration.unlink(missing_ok=True)
    lab.run(["sbatch", script])
    lab.wait_for("the job", lambda: duration.exists() and duration.read_text().endswith("\n"), 600)
    return int(duration.read_text()) / 1e9


def stage_with_dtslurm(lab: SlurmLab, source: Path, folder: Path) -> float:
    """Return the seconds that `--stage` takes in the job, as its event says."""
    (folder / "train.py").write_text(TRAIN)
    env = lab.environ({"DTSLURM_RUN_ROOT": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state")})
    arguments = ["submit", "--cluster", "slurm", "-N", "4", "-l", "srun", "-t", "30", "--wait", "--json"]
    arguments += ["--stage", f"{source}:{lab.root / 'local' / 'data'}", "train.py"]
    process = subprocess.run(
        [sys.executable, "-m", "dtslurm", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    run = Path(json.loads(process.stdout)["run"]["run_dir"])
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return next(float(event["seconds"]) for event in events if event["event"] == "staged")


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
                times["by hand"].append(stage_by_hand(lab, folder / "data"))
                clear_disks(lab, count)
                times["--stage"].append(stage_with_dtslurm(lab, folder / "data", folder))
                clear_disks(lab, count)
        for name, seconds in times.items():
            print(f"{name:8} {statistics.median(seconds):6.1f} s  ({', '.join(f'{s:.1f}' for s in seconds)})")
        ratio = statistics.median(times["by hand"]) / statistics.median(times["--stage"])
        print(f"{megabytes} MB in {count} files to 4 nodes: {ratio:.2f} x the speed of tar and sbcast")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"total {time.monotonic() - start:.0f} s")
