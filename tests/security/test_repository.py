"""Attacks by a hostile repository: commands that only read must not run its programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.warm import run_dtslurm

CONFIG = ".git/config"


class Clone:
    """A clone whose author wants programs to run; each leaves `proof`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proof = folder.parent / "proof"
        self.program = folder.parent / "program"  # in a real attack it lies in the clone
        self.program.write_text(f"#!/bin/sh\ntouch {self.proof}\n")
        self.program.chmod(0o755)
        folder.mkdir()
        self.git("init", "-q")
        self.write("train.py", "print('trained')\n")
        self.write("data.txt", "one\n")

    def git(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=cwd or self.folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "all")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def configure(self, text: str, name: str = CONFIG) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def touch(self) -> None:
        """Make git look into a file that has not changed, and into one that has."""
        for name in ("train.py", "data.txt"):
            os.utime(self.folder / name, (1, 1))
        self.write("data.txt", "two\n")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def configure_filter(clone: Clone, name: str, config: str, *, kind: str = "clean", more: str = "") -> None:
    """Let git pass all files through a program, as ``config`` says."""
    clone.write(".gitattributes", f"* filter={name}\n")
    clone.commit()
    clone.configure(more)
    clone.configure(f'[filter "{name}"]\n {kind} = {clone.program}\n', config)


def _clean_filter(clone: Clone) -> None:
    configure_filter(clone, "x", CONFIG)


def _process_filter(clone: Clone) -> None:
    configure_filter(clone, "x", CONFIG, kind="process")


def _filter_with_an_equals_sign(clone: Clone) -> None:
    configure_filter(clone, "x=y", CONFIG)


def _filter_with_a_dot(clone: Clone) -> None:
    configure_filter(clone, "x.clean.y", CONFIG)


def _included_filter(clone: Clone) -> None:
    configure_filter(clone, "x", "more.config", more="[include]\n path = ../more.config\n")


def _filter_of_a_work_tree(clone: Clone) -> None:
    more = "[extensions]\n worktreeConfig = true\n"
    configure_filter(clone, "x", ".git/config.worktree", more=more)


def _fsmonitor(clone: Clone) -> None:
    clone.commit()
    clone.configure(f"[core]\n fsmonitor = {clone.program}\n")


def _external_diff(clone: Clone) -> None:
    clone.write(".gitattributes", "* diff=x\n")
    clone.commit()
    clone.configure(f'[diff]\n external = {clone.program}\n[diff "x"]\n command = {clone.program}\n')


def _text_conversion(clone: Clone) -> None:
    clone.write(".gitattributes", "* diff=x\n")
    clone.commit()
    clone.configure(f'[diff "x"]\n textconv = {clone.program}\n')


def _hooks(clone: Clone) -> None:
    clone.commit()
    for hook in ("post-index-change", "post-checkout", "pre-auto-gc", "reference-transaction"):
        path = clone.write(f"hooks/{hook}", clone.program.read_text())
        path.chmod(0o755)
    clone.configure(f"[core]\n hooksPath = {clone.folder}/hooks\n")


def _pager_and_ssh(clone: Clone) -> None:
    clone.commit()
    clone.configure(
        f"[core]\n pager = {clone.program}\n sshCommand = {clone.program}\n editor = {clone.program}\n"
        f"[alias]\n status = !{clone.program}\n[pager]\n diff = {clone.program}\n"
    )


def _partial_clone(clone: Clone, url: str, more: str = "") -> None:
    clone.commit()
    blob = clone.git("rev-parse", "HEAD:data.txt").strip()
    (clone.folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    clone.configure(
        f'[extensions]\n partialClone = origin\n[remote "origin"]\n url = {url}\n promisor = true\n{more}'
    )


PROTOCOL = '[protocol]\n allow = always\n[protocol "ext"]\n allow = always\n'


def _ext_url(clone: Clone) -> None:
    _partial_clone(clone, f'"ext::{clone.program} x"', PROTOCOL)


def _ssh_url(clone: Clone) -> None:
    _partial_clone(clone, "ssh://host/x", f"[core]\n sshCommand = {clone.program}\n")


def _upload_pack(clone: Clone) -> None:
    _partial_clone(clone, str(clone.folder), f" uploadpack = {clone.program}\n")


def _remote_helper(clone: Clone) -> None:
    _partial_clone(clone, "x::y", '[protocol "x"]\n allow = always\n')


def _submodule(clone: Clone) -> None:
    inner = Clone(clone.folder.parent / "inner")
    inner.write(".gitattributes", "* filter=x\n")
    inner.commit()
    clone.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner.folder), "sub")
    clone.commit()
    clone.configure(f'[filter "x"]\n clean = {clone.program}\n', ".git/modules/sub/config")
    os.utime(clone.folder / "sub/data.txt", (1, 1))
    clone.write("sub/data.txt", "two\n")


def _repository_within(clone: Clone) -> None:
    clone.commit()
    clone.write("sub/.gitattributes", "* filter=x\n")
    clone.write("sub/data.txt", "one\n")
    clone.git("init", "-q", cwd=clone.folder / "sub")
    clone.git("add", "-A", cwd=clone.folder / "sub")
    clone.git("commit", "-qm", "x", cwd=clone.folder / "sub")
    clone.configure(f'[filter "x"]\n clean = {clone.program}\n', "sub/.git/config")
    os.utime(clone.folder / "sub/data.txt", (1, 1))


ATTACKS = [
    _clean_filter, _process_filter, _filter_with_an_equals_sign, _filter_with_a_dot, _included_filter,
    _filter_of_a_work_tree, _fsmonitor, _external_diff, _text_conversion, _hooks, _pager_and_ssh, _ext_url,
    _ssh_url, _upload_pack, _remote_helper, _submodule, _repository_within,
]  # fmt: skip
COMMANDS = {
    "dry run": ("submit", "--dry-run", "--cluster", "local", "--snapshot", "train.py"),
    "in place": ("submit", "--dry-run", "--cluster", "local", "train.py"),
    "render": ("render", "--cluster", "local", "train.py"),
    "status": ("status",),
    "doctor": ("doctor", "--cluster", "local"),
}


def _look_around(
    clone: Clone, words: tuple[str, ...], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": "/usr/bin:/bin"}
    return run_dtslurm(words, cwd=cwd or clone.folder, env=env, timeout=60)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
def test_git_runs_no_program_of_the_repository(clone: Clone, attack: Callable[[Clone], None]) -> None:
    attack(clone)
    clone.touch()

    for what, words in COMMANDS.items():
        done = _look_around(clone, words)
        assert not clone.proof.exists(), what
        assert done.returncode in {0, 2}, done.stderr  # 2: what cannot be taken away is refused
        assert "Traceback" not in done.stderr


def test_git_configuration_of_a_nested_bare_repository_is_not_used(clone: Clone) -> None:
    clone.commit()
    bare = clone.folder / "sub"
    clone.git("init", "-q", str(bare))
    for entry in (bare / ".git").iterdir():
        entry.rename(bare / entry.name)
    (bare / ".git").rmdir()
    clone.write("sub/.gitattributes", "* filter=x\n")
    clone.write("sub/train.py", "print('trained')\n")
    clone.git(f"--git-dir={bare}", f"--work-tree={bare}", "add", "train.py")
    clone.git(f"--git-dir={bare}", f"--work-tree={bare}", "commit", "-qm", "x")
    config = bare / "config"
    config.write_text(
        f"[core]\n bare = false\n worktree = {bare}\n fsmonitor = {clone.program}\n"
        f'[filter "x"]\n clean = {clone.program}\n'
    )
    os.utime(bare / "train.py", (1, 1))
    clone.write("sub/train.py", "print('changed')\n")

    for words in COMMANDS.values():
        done = _look_around(clone, words, bare)
        assert not clone.proof.exists()
        assert done.returncode in {0, 2}, done.stderr  # git does not look into one


def test_dry_run_starts_no_interpreter_of_the_project(clone: Clone) -> None:
    python = clone.write(".venv/bin/python", clone.program.read_text())
    python.chmod(0o755)
    clone.write(".venv/pyvenv.cfg", "home = /usr/bin\nuv = 0.5\n")
    clone.write(".venv/bin/activate", "")
    clone.write("uv.lock", "")
    clone.commit()

    dry_run = ("submit", "--dry-run", "--cluster", "local", "-l", "torchrun", "train.py")
    done = _look_around(clone, dry_run)

    assert ".venv" in done.stdout
    assert not clone.proof.exists()
