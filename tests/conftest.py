"""Fixtures of the whole suite: a real Slurm, and a test's independence of its user's settings."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.lab.cluster import FOREIGN, LONGEST_ROOT, SlurmLab
from tests.lab.software import SlurmUnavailable, Software, find_or_unpack
from tests.sshd.fixtures import sshd_lab, sshd_login, sshd_software

__all__ = ["sshd_lab", "sshd_login", "sshd_software"]

SLURM_FIXTURES = {"slurm_software", "slurm_lab", "slurm_env"}
OF_THE_SUITE = {"DTSLURM_REQUIRE_SLURM", "DTSLURM_SLURM_PREFIX"}


def pytest_configure() -> None:
    """Let interrupts arrive in the programs that tests start: a shell's background jobs ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if SLURM_FIXTURES.intersection(fixtures):
            item.add_marker("slurm")
        if nothing_may_be_missing():  # most of these tests start processes, which a busy machine may hold up
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what went wrong in first tries: each is a fault to be found, though it fails no whole run."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"passed or failed only when run again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


def nothing_may_be_missing() -> bool:
    """Whether tests that need Slurm or other programs must run: in CI, or if asked for."""
    values = (os.environ.get("CI"), os.environ.get("DTSLURM_REQUIRE_SLURM"))
    return any(value and value.lower() not in {"0", "false", "no"} for value in values)


def missing(what: str, installer: str) -> NoReturn:
    """Skip a test whose program is not on this machine; fail it where nothing may be missing."""
    if nothing_may_be_missing():
        pytest.fail(f"needs {what} ({installer} installs it)", pytrace=False)
    pytest.skip(f"needs {what}")


def no_slurm(error: SlurmUnavailable) -> NoReturn:
    missing(f"a real Slurm: {error}", "tests/lab/install.sh")


@pytest.fixture(scope="session", autouse=True)
def as_urgent_as_ever() -> Iterator[None]:
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
        no_slurm(error)


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
        no_slurm(error)
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
