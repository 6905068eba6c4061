"""Fixtures of the whole suite: a real Slurm, and a test's independence of its user's settings."""

from __future__ import annotations

import datetime as dt
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from tests.lab.cluster import FOREIGN, LONGEST_ROOT, SlurmLab
from tests.lab.software import SlurmUnavailable, Software, find_or_unpack
from tests.sshd.fixtures import sshd_lab, sshd_login, sshd_software

__all__ = ["sshd_lab", "sshd_login", "sshd_software"]

SLURM_FIXTURES = {"slurm_software", "slurm_lab", "slurm_env"}
SSH_FIXTURES = {"sshd_software", "sshd_lab", "sshd_login"}
TESTS = Path(__file__).parent
E2E = TESTS / "e2e"
SECOND_TRIES = TESTS / "second_tries.txt"
# Each takes minutes in one process, some of them waiting and some computing: they begin first and together.
TAKE_LONGEST = (
    "e2e/test_runs.py",
    "frameworks/test_torch_family.py",
    "e2e/test_diagnose.py",
    "e2e/test_survival.py",
    "frameworks/test_other_frameworks.py",
    "e2e/test_top.py",
    "e2e/test_survival_torch.py",
    "e2e/test_executor.py",
    "e2e/test_submitits_own.py",
)
OF_THE_SUITE = {"DTSLURM_REQUIRE_SLURM", "DTSLURM_SLURM_PREFIX"}

# The machine may be busy: how long an example takes says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Let interrupts arrive in the programs that tests start: a shell's background jobs ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_compiled_code()
    start_python_without_a_shim()


def keep_compiled_code() -> None:
    """Compile each module once: where Python may not keep that, each command would compile dtslurm anew."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def start_python_without_a_shim() -> None:
    """Put the interpreter first on the PATH where `python3` is a script that looks for it each time."""
    interpreter = Path(sys.base_prefix, "bin", "python3")
    first = shutil.which("python3")
    if interpreter.exists() and first is not None and not interpreter.samefile(first):
        os.environ["PATH"] = f"{interpreter.parent}:{os.environ['PATH']}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the millions of objects that all tests together are.

    To look at them again and again took a fifth of the time of the tests that run in this process.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, and put the files that take longest first: each runs in one process."""
    with_second_try = second_tries(SECOND_TRIES.read_text(), dt.date.today())
    order: dict[Path, int] = {TESTS / name: number for number, name in enumerate(TAKE_LONGEST)}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if SLURM_FIXTURES.intersection(fixtures):
            item.add_marker("slurm")
        if SSH_FIXTURES.intersection(fixtures):
            item.add_marker("ssh")
        if E2E in item.path.parents:
            item.add_marker("e2e")
        if skips_are_failures() and item.nodeid in with_second_try:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if any(item.get_closest_marker(name) for name in ("slow", "slurm", "ssh")):
            order.setdefault(item.path, len(TAKE_LONGEST))
    items.sort(key=lambda item: order.get(item.path, len(TAKE_LONGEST) + 1))


def second_tries(text: str, today: dt.date) -> set[str]:
    """Return the tests on the list that were put there in the last thirty days."""
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line and not line.startswith("#")]
    return {test for date, test, _reason in rows if (today - dt.date.fromisoformat(date)).days <= 30}


def skips_are_failures() -> bool:
    """Whether tests that need Slurm or other programs must run: in CI, or if asked for."""
    values = (os.environ.get("CI"), os.environ.get("DTSLURM_REQUIRE_SLURM"))
    return any(value and value.lower() not in {"0", "false", "no"} for value in values)


def skip_or_fail(what: str, installer: str = "") -> NoReturn:
    """Skip a test whose program is not on this machine; fail it where nothing may be missing."""
    if skips_are_failures():
        pytest.fail(f"needs {what}" + (f" ({installer} installs it)" if installer else ""), pytrace=False)
    pytest.skip(f"needs {what}")


def skip_or_fail_without_slurm(error: SlurmUnavailable) -> NoReturn:
    skip_or_fail(f"a real Slurm: {error}", "tests/lab/install.sh")


@pytest.fixture(scope="session", autouse=True)
def keep_priority() -> Iterator[None]:
    """Keep far programs that a test runs in its own process from making the rest of the suite yield."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda more: more)
        yield


@pytest.fixture(scope="session")
def slurm_software() -> Software:
    """The Slurm programs on this machine, unpacked into the user's cache if they are not installed."""
    try:
        return find_or_unpack(accounting=True)
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)


@pytest.fixture(scope="session")
def slurm_lab(slurm_software: Software, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A cluster of four nodes with accounting, shared by all tests: leave its daemons as they are."""
    root = tmp_path_factory.mktemp("slurm")
    short = None
    if len(str(root)) > LONGEST_ROOT:
        root = short = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    try:
        with SlurmLab(root, accounting=True, software=slurm_software) as lab:
            yield lab
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        if short is not None:
            shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def lab_root() -> Iterator[Path]:
    """A folder with a short path, as a lab needs it: a test's own may be too long, above all with xdist."""
    folder = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm_env(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, isolated: None) -> SlurmLab:
    """The shared cluster, reachable from this process as from one of its login nodes."""
    for name, value in slurm_lab.env.items():
        monkeypatch.setenv(name, value)
    return slurm_lab


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's settings, runs and Slurm out of every test; see that one marked `slurm` has a Slurm."""
    if request.node.get_closest_marker("slurm"):
        request.getfixturevalue("slurm_software")
    for name in list(os.environ):
        if name.startswith(FOREIGN) or (name.startswith("DTSLURM_") and name not in OF_THE_SUITE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if not request.node.get_closest_marker("frameworks"):  # what they compile may be used again
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("DTSLURM_TRUSTED_FOLDERS", "/")  # what a test writes is its own
