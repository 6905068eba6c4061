"""Frameworks outside torch: two nodes with two processes each on the suite's Slurm."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.envs import CACHE, environment
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(2700)]

SCRIPTS = Path(__file__).with_name("scripts_others")
ENV = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    # Both nodes are this machine: to Open MPI they must not look as if they shared memory.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
HOROVOD_BASE = [
    *("torch==2.13.0", "numpy", "mpi4py==4.1.2", "setuptools<81", "wheel", "packaging"),
    *("cloudpickle", "psutil", "pyyaml", "cffi"),
]


def jax_python() -> Path:
    return environment("jax", ["jax==0.10.2"])


def tensorflow_python() -> Path:
    return environment("tensorflow", ["tensorflow-cpu==2.21.0"])


def ray_python() -> Path:
    return environment("ray", ["ray==2.58.0"])


def mpi_python() -> Path:
    needs_open_mpi()
    return environment("mpi", ["mpi4py==4.1.2", "numpy"])


def horovod_python() -> Path:
    """Horovod as released wants C++14, which today's torch does not compile with: it is built with C++17."""
    needs_open_mpi()
    if not (shutil.which("cmake") and shutil.which("g++")):
        pytest.skip("building Horovod needs cmake and g++")
    python = environment("horovod", HOROVOD_BASE)
    with (CACHE / "horovod-build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run(
            [python, "-c", "import horovod.torch"], capture_output=True, check=False
        ).returncode:
            build_horovod(python)
    return python


def build_horovod(python: Path) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        download = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        subprocess.run([*pip, *download, "-d", folder, "horovod==0.28.1"], check=True, timeout=300)
        [archive] = Path(folder).glob("horovod-*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")
        source = Path(folder) / "horovod-0.28.1"
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            text = (source / name).read_text()
            (source / name).write_text(text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"))
        chosen = {"WITH_PYTORCH": "1", "WITHOUT_TENSORFLOW": "1", "WITHOUT_MXNET": "1"}
        chosen |= {"WITH_GLOO": "1", "WITH_MPI": "1"}
        env = {**os.environ, **{f"HOROVOD_{key}": value for key, value in chosen.items()}}
        install = ["install", "--quiet", "--no-build-isolation", str(source)]
        subprocess.run([*pip, *install], env=env, check=True, timeout=2400)


def needs_open_mpi() -> None:
    if shutil.which("mpirun") is None or shutil.which("mpicc") is None:
        pytest.skip("needs Open MPI (openmpi-bin, libopenmpi-dev)")


class PmixLab(SlurmLab):
    """A lab whose nodes keep PMIx's files apart, each in a file system of its own, as machines do."""

    def _write_files(self) -> None:
        super()._write_files()
        (self.root / "run/pmix").mkdir()
        (self.root / "etc/mpi.conf").write_text(f"PMIxCliTmpDirBase={self.root}/run/pmix\n")

    def _private_hosts(self) -> list[str]:
        own = f"mount -t tmpfs tmpfs {self.root}/run/pmix && exec "
        words = super()._private_hosts()
        if not words:
            pytest.skip("needs mount namespaces")
        return [word.replace("exec ", own, 1) if word.startswith("mount ") else word for word in words]


@pytest.fixture(scope="module")
def lab(slurm_software: Software) -> Iterator[SlurmLab]:
    root = Path(tempfile.mkdtemp(prefix="dtslurm-pmix-", dir="/tmp"))
    try:
        with PmixLab(root, software=slurm_software) as cluster:
            yield cluster
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def cli(lab: SlurmLab, tmp_path: Path) -> Iterator[Cli]:
    folder = tmp_path / "project"
    shutil.copytree(SCRIPTS, folder)
    env = {
        "DTSLURM_RUN_ROOT": str(tmp_path / "runs"),
        "DTSLURM_LOCAL_STATE": str(tmp_path / "local"),
        **lab.env,
    }
    tool = Cli("slurm", folder, env)
    yield tool
    for job in tool.started:
        tool("cancel", job, code=None)


def words(launcher: str, python: Path, *options: str) -> list[str]:
    env = [word for key, value in ENV.items() for word in ("--env", f"{key}={value}")]
    ranks = [] if launcher == "ray" else ["--ntasks-per-node", "2"]
    chosen = [word for option in options for word in ("--launcher-option", option)]
    return ["-N2", "-c2", *ranks, "-l", launcher, "--python", str(python), *env, *chosen]


def output(cli: Cli, job: str) -> str:
    """Everything a run has said, for messages."""
    folder = cli.run_dir(job).path
    texts = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("logs/**/*.log"))]
    return "\n".join(texts)


def is_over(cli: Cli, job: str) -> bool:
    return not {"PENDING", "RUNNING"} & set(cli.state(job).split(","))


def losses(log: Path) -> list[float]:
    return [float(match) for match in re.findall(r"step \d+ loss ([\d.]+)", log.read_text())]


KINDS: dict[str, tuple[str, Callable[[], Path], tuple[str, ...]]] = {
    "jax": ("jax", jax_python, ()),
    "tensorflow": ("tensorflow", tensorflow_python, ()),
    "mpi-pmix": ("mpi", mpi_python, ("mpi=pmix",)),
    "horovod-mpi": ("horovod", horovod_python, ("mpi=pmix",)),
    "horovod-gloo": ("horovod", horovod_python, ("form=gloo",)),
    "ray": ("ray", ray_python, ()),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def ranks_of(launcher: str) -> list[int]:
    return [0] if launcher == "ray" else [0, 1, 2, 3]


@pytest.mark.proves("kind", "runs", "logs")
@pytest.mark.sampled(1)
def test_ranks_train_together(kind: str, cli: Cli) -> None:
    launcher, python, options = KINDS[kind]
    job = cli.submit(*words(launcher, python(), *options), f"{launcher}_fit.py")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), output(cli, job)
    expected = ranks_of(launcher)
    assert [(record.rank, record.exit_code) for record in run.ranks(0)] == [(rank, 0) for rank in expected]
    for rank in expected:
        log = run.logs(0) / f"rank-{rank}.log"
        result = losses(log)
        assert len(result) == 30
        assert result[-1] < result[0] / 10
        if launcher == "ray":
            assert "nodes 2 cpus 4" in log.read_text()
            assert "spread over 2" in log.read_text()
        else:
            assert f"rank {rank} of 4 local {rank % 2}" in log.read_text()
    if launcher != "ray":
        assert len({record.host for record in run.ranks(0)}) == 2
    assert run.manifest(0)["world_size"] == len(expected)


@pytest.mark.proves("kind", "exit")
@pytest.mark.sampled(1, "other ways")
def test_exit_code_of_the_failed_rank_is_the_exit_code_of_the_job(kind: str, cli: Cli) -> None:
    launcher, python, options = KINDS[kind]
    job = cli.submit(*words(launcher, python(), *options), f"{launcher}_fit.py", "fail")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    last = ranks_of(launcher)[-1]
    assert (status["state"], status["exit_code"]) == ("FAILED", 17), output(cli, job)
    run = cli.run_dir(job)
    assert run.first_failure(0) == (last, 17)
    assert {record.rank: record.exit_code for record in run.ranks(0)}[last] == 17
    assert "giving up" in (run.logs(0) / f"rank-{last}.log").read_text()


@pytest.mark.proves("kind", "signal")
@pytest.mark.sampled(1, "other ways")
def test_early_signal_reaches_the_training_code(kind: str, cli: Cli) -> None:
    launcher, python, options = KINDS[kind]
    chosen = [*words(launcher, python(), *options), "--signal-before", "60"]
    job = cli.submit(*chosen, f"{launcher}_fit.py", "wait")
    logs = cli.run_dir(job).logs(0)
    last = logs / f"rank-{ranks_of(launcher)[-1]}.log"
    cli.wait_until(lambda: (last.exists() and "step 3 " in last.read_text()) or is_over(cli, job), limit=120)
    assert not is_over(cli, job), output(cli, job)
    subprocess.run(["scancel", "-s", "USR2", job], env={**os.environ, **cli.env}, check=True)
    status = cli.wait_for_end(job, limit=120)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), output(cli, job)
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in ranks_of(launcher)]
    assert sum("leaving on the early signal" in text for text in texts) >= 1
    assert all("early signal" in text or "another rank heard it" in text for text in texts)


@pytest.mark.sampled(1, "other ways")
def test_tensorflow_slurm_resolver_finds_the_workers(cli: Cli) -> None:
    chosen = words("tensorflow", tensorflow_python(), "form=slurm")
    place = chosen.index("CUDA_VISIBLE_DEVICES=")
    del chosen[
        place - 1 : place + 1
    ]  # the resolver counts the job's GPUs; this TensorFlow has no use for them
    job = cli.submit(*chosen, "--gpus-per-node", "2", "tensorflow_resolver_fit.py")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    run = cli.run_dir(job)
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), output(cli, job)
    for rank in range(4):
        log = run.logs(0) / f"rank-{rank}.log"
        assert f"rank {rank} of 4 local {rank % 2}" in log.read_text()
        assert len(re.findall(r"n[12]:\d+", log.read_text().partition("workers ")[2].partition("]")[0])) == 4
        result = losses(log)
        assert len(result) == 30
        assert result[-1] < result[0] / 10


@pytest.mark.sampled(1, "other ways")
def test_mpirun_starts_ranks_when_srun_has_no_pmi(cli: Cli) -> None:
    job = cli.submit(*words("mpi", mpi_python(), "start=mpirun"), "mpi_fit.py", "fail")
    status = cli.wait_for_end(job, limit=120)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 17), output(cli, job)
    run = cli.run_dir(job)
    assert run.first_failure(0) == (3, 17)
    assert [(record.rank, record.local_rank, record.node_rank) for record in run.ranks(0)] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert "rank 3 of 4 local 1" in (run.logs(0) / "rank-3.log").read_text()
