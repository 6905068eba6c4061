"""Data staged to local disks and results copied back, on a real Slurm of four nodes with separate disks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli
from tests.lab.cluster import SlurmLab
from tests.lab.software import SlurmUnavailable, Software

pytestmark = pytest.mark.slurm

# Says what its node has; with a second argument it writes that down on the node's disk too.
TRAIN = """\
import os, pathlib, sys
place = pathlib.Path(os.environ["DTSLURM_STAGED_DATA"])
names = sorted(p.name for p in place.rglob("*") if p.is_file())
print("has", len(names), " ".join(names[:4]))
if len(sys.argv) > 1:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(exist_ok=True)
    (out / "result.txt").write_text(os.environ["SLURMD_NODENAME"])
"""


@pytest.fixture(scope="module")
def lab(slurm_software: Software, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """Nodes n1 to n4 with disks of their own, n5 with one that is nearly full."""
    del tmp_path_factory
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    disks = {**dict.fromkeys(["n1", "n2", "n3", "n4"]), "n5": "64k"}
    try:
        with SlurmLab(root, nodes=5, gpus=0, disks=disks, software=slurm_software) as up:
            yield up
    except SlurmUnavailable as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def cli(lab: SlurmLab, tmp_path: Path) -> Iterator[Cli]:
    folder = tmp_path / "project"
    folder.mkdir()
    env = {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
    tool = Cli("slurm", folder, env)
    tool.script(TRAIN)
    yield tool
    for job in tool.started:
        tool("cancel", job, code=None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "data"
    (folder / "deep").mkdir(parents=True)
    for number in range(8):
        (folder / f"shard-{number}.tar").write_bytes(bytes([number]) * 40_000)
    (folder / "deep" / "it's one.txt").write_text("x")
    return folder


def submit(cli: Cli, *words: str, nodes: str = "n[1-4]", count: int = 4) -> str:
    return cli.submit("-l", "srun", "-N", str(count), "-w", nodes, *words)


def batch_log(cli: Cli, job: str) -> str:
    return (cli.run_dir(job).path / "logs" / "batch.log").read_text()


def events(cli: Cli, job: str, name: str) -> list[dict[str, Any]]:
    lines = (cli.run_dir(job).path / "events.jsonl").read_text().splitlines()
    return [item for item in map(json.loads, lines) if item["event"] == name]


def files_seen_by_ranks(cli: Cli, job: str, attempt: int = 0) -> list[str]:
    """Return what each rank said it has."""
    logs = cli.run_dir(job).path / "logs" / str(attempt)
    return [path.read_text().strip() for path in sorted(logs.glob("rank-*.log"))]


def end_state(cli: Cli, job: str) -> tuple[str, int | None]:
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    return status["state"], status["exit_code"]


@contextlib.contextmanager
def delayed_staging(lab: SlurmLab, node: str, name: str = "data") -> Iterator[None]:
    """Let a node's staging wait, as a slow disk would."""
    path = lab.root / "disks" / node / f".{name}.dtslurm-lock"
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stagers(node: str) -> list[int]:
    """Return the processes that bring data to a node."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
            if (
                b"bring" in words
                and b"srun" not in words[0]
                and f"SLURMD_NODENAME={node}".encode() in environ
            ):
                result.append(int(folder.name))
    return result


def clean(lab: SlurmLab) -> None:
    for disk in (lab.root / "disks").iterdir():
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(autouse=True)
def empty(lab: SlurmLab) -> None:
    clean(lab)


def test_staging_gives_every_node_the_data_and_copies_results_back(
    cli: Cli, lab: SlurmLab, data: Path
) -> None:
    local = lab.root / "local"
    words = ["--stage", f"{data}:{local}/data", "--stage-out", f"{local}/out:results"]
    job = submit(cli, *words, "train.py", f"{local}/out")
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert files_seen_by_ranks(cli, job) == ["has 9 it's one.txt shard-0.tar shard-1.tar shard-2.tar"] * 4
    for node in ("n1", "n2", "n3", "n4"):
        disk = lab.root / "disks" / node
        assert (disk / "data" / "shard-7.tar").read_bytes() == bytes([7]) * 40_000
        assert not list(disk.glob(".*-part"))
    assert "staged" in batch_log(cli, job)
    assert "of the time limit are left" in batch_log(cli, job)
    done = [item for item in events(cli, job, "staging") if item["done"] and "out" not in item]
    assert {item["node"] for item in done} == {"n1", "n2", "n3", "n4"}
    assert {(item["bytes"], item["total"]) for item in done} == {(320_001, 320_001)}
    run = cli.run_dir(job).path
    back = sorted((run / "results").glob("node-*/result.txt"))
    assert [path.read_text() for path in back] == ["n1", "n2", "n3", "n4"]
    listed = json.loads(cli("artifacts", "list", job, "--json").stdout)["artifacts"]
    assert [item["path"] for item in listed] == [f"results/node-{number}" for number in range(4)]

    # Another job on the same nodes copies nothing; a source that has changed is copied anew.
    before = (lab.root / "disks/n1/data/shard-0.tar").stat().st_ino
    job = submit(cli, "--stage", f"{data}:{local}/data", "train.py")
    assert end_state(cli, job) == ("COMPLETED", 0)
    assert "is already on all nodes" in batch_log(cli, job)
    assert (lab.root / "disks/n1/data/shard-0.tar").stat().st_ino == before
    (data / "shard-8.tar").write_text("new")
    (data / "shard-7.tar").unlink()
    job = submit(cli, "--stage", f"{data}:{local}/data:method=pack", "train.py")
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert "by pack" in batch_log(cli, job)
    assert not (lab.root / "disks/n4/data/shard-7.tar").exists()
    assert not list((cli.run_dir(job).path / "staged").rglob("*.tar"))


def test_staging_distributes_shards_evenly_and_sbcast_reaches_all_nodes(
    cli: Cli, lab: SlurmLab, data: Path
) -> None:
    local = lab.root / "local"
    shutil.rmtree(data / "deep")
    job = submit(cli, "--stage", f"{data}:{local}/data:shards=node", "train.py")
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert all(text.startswith("has 2 ") for text in files_seen_by_ranks(cli, job))
    document = json.loads((cli.run_dir(job).path / "staged" / "data.shards.json").read_text())
    assert sorted(file["node"] for file in document["files"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    clean(lab)
    job = submit(cli, "--stage", f"{data}:{local}/data:method=sbcast", "train.py")
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert files_seen_by_ranks(cli, job) == ["has 8 shard-0.tar shard-1.tar shard-2.tar shard-3.tar"] * 4
    assert "by sbcast" in batch_log(cli, job)
    assert sorted(path.name for path in (lab.root / "disks/n2").iterdir()) == [
        ".data.dtslurm-lock", "data", "data.dtslurm.json",
    ]  # fmt: skip


def test_results_are_copied_on_the_early_signal(cli: Cli, lab: SlurmLab, tmp_path: Path) -> None:
    local, go = lab.root / "local", tmp_path / "go"
    cli.script(
        f"""\
        import os, pathlib, time
        out = pathlib.Path("{local}/early")
        out.mkdir(exist_ok=True)
        (out / "half.txt").write_text("so far")
        print("wrote", flush=True)
        while not os.path.exists("{go}"):
            time.sleep(0.1)
        (out / "half.txt").write_text("all of it")
        """,
        "wait.py",
    )
    words = ["--stage-out", f"{local}/early:early", "--signal-before", "60"]
    job = submit(cli, *words, "wait.py", nodes="n[1-2]", count=2)
    run = cli.run_dir(job).path
    cli.wait_until(lambda: files_seen_by_ranks(cli, job) == ["wrote", "wrote"], limit=120)

    def told() -> list[bool]:
        return [json.loads(path.read_text())["final"] for path in sorted(run.glob("early/node-*.json"))]

    def signalled() -> bool:
        lab.run(["scancel", "--signal=USR2", job], check=False)
        return told() == [False, False]

    cli.wait_until(signalled, limit=120)  # what waits for the signal may not be up yet
    assert (run / "early/node-1/half.txt").read_text() == "so far"
    go.touch()
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert told() == [True, True]
    assert (run / "early/node-1/half.txt").read_text() == "all of it"


def test_full_local_disk_is_reported_before_the_copy(cli: Cli, lab: SlurmLab, data: Path) -> None:
    words = ["--stage", f"{data}:{lab.root}/local/data", "train.py"]
    job = submit(cli, *words, nodes="n[1-2,5]", count=3)
    assert end_state(cli, job)[1] == 88
    result = batch_log(cli, job)
    assert re.search(r"staging failed: n5: .* do not fit on \S+, where 64\.0 KiB are free", result)
    assert "nothing was copied" in result
    assert not list((lab.root / "disks/n1").iterdir())
    verdict = json.loads(cli("diagnose", "--json", job, code=None).stdout)
    assert "do not fit" in json.dumps(verdict)


def test_node_without_the_source_is_named(cli: Cli, lab: SlurmLab, data: Path) -> None:
    local = lab.root / "local"
    source = local / "only-here"  # what lies at this path is each node's own
    shutil.copytree(data, lab.root / "disks/n1/only-here")
    job = submit(cli, "--no-check", "--stage", f"{source}:{local}/data:method=copy", "train.py")
    assert end_state(cli, job)[1] == 88
    result = batch_log(cli, job)
    assert f"n3: {source} does not exist on this node" in result
    assert "n1:" not in result
    assert not (lab.root / "disks/n1/data").exists()


def test_staging_waits_for_a_slow_node_and_replaces_a_partial_copy(
    cli: Cli, lab: SlurmLab, data: Path
) -> None:
    words = ["--stage", f"{data}:{lab.root}/local/data", "train.py"]
    n2 = lab.root / "disks/n2"
    with delayed_staging(lab, "n2"):
        job = submit(cli, *words)
        cli.wait_until(lambda: stagers("n2") and (lab.root / "disks/n3/data").exists(), limit=120)
        cli.wait_until(lambda: "(75%), 3 of 4 nodes have finished" in cli("status", job).stdout, limit=120)
        # A copy that was cut off: one file whole, one half.
        draft = n2 / ".data.dtslurm-part"
        draft.mkdir()
        shutil.copy2(data / "shard-0.tar", draft)
        (draft / "shard-1.tar").write_bytes(b"half")
        for pid in stagers("n2"):
            os.kill(pid, signal.SIGKILL)
    assert end_state(cli, job)[1] == 88
    assert "n2 ended without an error message while it copied" in batch_log(cli, job)
    assert not (n2 / "data").exists()
    assert files_seen_by_ranks(cli, job) == []

    kept = (n2 / ".data.dtslurm-part" / "shard-0.tar").stat().st_ino
    with delayed_staging(lab, "n2"):
        job = submit(cli, *words)
        cli.wait_until(lambda: stagers("n2"), limit=120)
        assert files_seen_by_ranks(cli, job) == []  # no rank starts before all have the data
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    assert "on 1 of 4 nodes" in batch_log(cli, job)
    assert (n2 / "data" / "shard-0.tar").stat().st_ino == kept
    assert (n2 / "data" / "shard-1.tar").read_bytes() == bytes([1]) * 40_000


def test_spare_node_is_staged_before_it_runs_ranks(cli: Cli, lab: SlurmLab, data: Path) -> None:
    """The first attempt fails with a GPU fault; the spare node has the data when the next attempt begins."""
    cli.script(
        TRAIN + "if os.environ['DTSLURM_ATTEMPT'] == '0' and os.environ['SLURM_PROCID'] == '1':\n"
        "    print('NCCL WARN Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus', flush=True)\n"
        "    sys.exit(1)\n",
        "fall.py",
    )
    words = ["--stage", f"{data}:{lab.root}/local/data", "--spare-nodes", "1", "--max-restarts", "2"]
    job = submit(cli, *words, "fall.py", nodes="n[1-3]", count=2)
    assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    nodes = [item["nodes"] for item in events(cli, job, "attempt")]
    assert len(nodes) == 2
    assert files_seen_by_ranks(cli, job, 1) == ["has 9 it's one.txt shard-0.tar shard-1.tar shard-2.tar"] * 2
    brought = [item["node"] for item in events(cli, job, "staging") if item["attempt"] == 1]
    assert set(brought) == set(nodes[1]) - set(nodes[0])


def test_node_lost_during_staging_is_excluded(cli: Cli, lab: SlurmLab, data: Path) -> None:
    words = ["--stage", f"{data}:{lab.root}/local/data", "--spare-nodes", "1", "--max-restarts", "2"]
    try:
        with delayed_staging(lab, "n2"):
            job = submit(cli, *words, "train.py", nodes="n[1-3]", count=2)
            cli.wait_until(lambda: stagers("n2") and (lab.root / "disks/n1/data").exists(), limit=120)
            lab.kill_node("n2")
            lab.run(
                ["scontrol", "update", "nodename=n2", "state=down", "reason=power"]
            )  # or Slurm takes a minute
        assert end_state(cli, job) == ("COMPLETED", 0), batch_log(cli, job)
    finally:
        lab.start_node("n2")
        lab.wait_idle()
    assert not (lab.root / "disks/n2/data").exists()
    assert [item["nodes"] for item in events(cli, job, "attempt")][1:] == [["n1", "n3"]]
    assert files_seen_by_ranks(cli, job, 0) == []
    assert files_seen_by_ranks(cli, job, 1) == ["has 9 it's one.txt shard-0.tar shard-1.tar shard-2.tar"] * 2
