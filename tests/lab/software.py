"""Where the Slurm programs are: installed, or unpacked below a prefix."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "munged", "sinfo", "srun", "sbatch")
NEEDED_FOR_ACCOUNTING = ("slurmdbd", "sacctmgr")
ALTERNATIVES = {"mariadbd": ("mariadbd", "mysqld"), "mariadb": ("mariadb", "mysql")}
SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # often missing on an ordinary user's PATH
INSTALL = Path(__file__).with_name("install.sh")
OWN_LIBRARIES = ".own-libraries"  # below a prefix whose programs know where their libraries are


class SlurmUnavailable(Exception):
    """No Slurm on this machine, or not one that can be run here."""


@dataclass(frozen=True)
class Software:
    """A set of Slurm programs; `prefix` is None for an installed one."""

    prefix: Path | None
    search: str  # folders with the programs, as in PATH

    def which(self, name: str) -> str:
        """The file of a program."""
        for candidate in ALTERNATIVES.get(name, (name, f"{name}-wlm")):
            result = shutil.which(candidate, path=self.search)
            if result:
                return result
        where = f"below {self.prefix}" if self.prefix else "installed"
        raise SlurmUnavailable(f"no {name} {where}")

    def library_dirs(self) -> list[Path]:
        """Folders the loader needs beside its own."""
        if self.prefix is None or (self.prefix / OWN_LIBRARIES).exists():
            return []
        plugins = self.plugin_dir()
        folders = [] if plugins is None else [plugins]
        for usr in (self.prefix / "usr", self.prefix):
            folders += sorted(p for p in usr.glob("lib/*-linux-gnu*") if p.is_dir())
        return folders

    def plugin_dir(self) -> Path | None:
        """Slurm's plugins, where they are not at the place compiled in."""
        if self.prefix is None:
            return None
        paths = sorted(self.prefix.glob("usr/lib/*/slurm*/auth_munge.so"))
        if not paths:
            raise SlurmUnavailable(f"no Slurm plugins below {self.prefix}")
        return paths[0].parent

    def env(self) -> dict[str, str]:
        """Variables that make the programs run."""
        own = [] if self.prefix is None else [self.search]
        env = {"PATH": ":".join([*own, os.environ.get("PATH", os.defpath), *SYSTEM])}
        libraries = [str(p) for p in self.library_dirs()]
        if libraries:
            inherited = os.environ.get("LD_LIBRARY_PATH", "")
            env["LD_LIBRARY_PATH"] = ":".join([*libraries, *filter(None, [inherited])])
        return env

    def version(self) -> str:
        """The version, as in `22.05.8`."""
        env = {**os.environ, **self.env()}
        argv = [self.which("slurmctld"), "-V"]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=30, check=False)
        if done.returncode != 0:
            raise SlurmUnavailable(f"{argv[0]} does not run: {done.stderr.strip()}")
        return done.stdout.split()[-1]

    def check(self, *, accounting: bool) -> None:
        """Raise SlurmUnavailable unless all programs are there and run."""
        for name in (*NEEDED, *((*NEEDED_FOR_ACCOUNTING, *ALTERNATIVES) if accounting else ())):
            self.which(name)
        self.version()


def cached_prefix() -> Path:
    """Where install.sh unpacks Slurm for an ordinary user."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache) / "dtslurm" / "slurm-prefix"


def at_prefix(prefix: Path) -> Software:
    """The programs unpacked below `prefix`."""
    return Software(prefix, f"{prefix}/usr/sbin:{prefix}/usr/bin")


def installed() -> Software:
    """The programs on PATH and in the system's folders."""
    return Software(None, ":".join([os.environ.get("PATH", os.defpath), *SYSTEM]))


def find(*, accounting: bool = False) -> Software:
    """The Slurm to use: $DTSLURM_SLURM_PREFIX, else the installed one, else the unpacked one in the cache."""
    named = os.environ.get("DTSLURM_SLURM_PREFIX")
    choices = [at_prefix(Path(named))] if named else [installed(), at_prefix(cached_prefix())]
    reasons = []
    for software in choices:
        try:
            software.check(accounting=accounting)
        except SlurmUnavailable as error:
            reasons.append(str(error))
        else:
            return software
    raise SlurmUnavailable("; ".join(reasons))


def find_or_unpack(*, accounting: bool = False) -> Software:
    """As `find`; where there is none, unpack the distribution's packages into the cache."""
    try:
        return find(accounting=accounting)
    except SlurmUnavailable as error:
        if os.environ.get("DTSLURM_SLURM_PREFIX"):
            raise
        missing = error
    if shutil.which("apt-get") is None:
        raise SlurmUnavailable(f"{missing}, and there is no apt-get to download it with")
    argv = ["bash", str(INSTALL), "--unpack"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{missing}, and downloading it took more than 240 s") from missing
    if done.returncode != 0:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SlurmUnavailable(f"{missing}, and downloading it failed: {tail[0]}")
    return find(accounting=accounting)
