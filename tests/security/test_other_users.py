"""Attacks by other users of the same machine: planted, readable or replaceable files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dtslurm.model.own_files import check_own_file, make_folders, make_own_folder, read_own_file
from dtslurm.worker.lib.disk import swappable
from tests.warm import run_dtslurm


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder be another user's; only root can do so really."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("umask", [0, 0o002, 0o027])
def test_files_and_directories_of_dtslurm_are_not_writable_by_other_users(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "dtslurm.yaml").write_text("defaults:\n  setup: ['true']\n")
    (folder / "dtslurm.yaml").chmod(0o600)
    homes = {
        f"XDG_{kind.upper()}_HOME": str(tmp_path / "homes" / kind) for kind in ("cache", "state", "config")
    }
    env = {**os.environ, **homes, "DTSLURM_LOCAL_STATE": str(tmp_path / "homes" / "local")}
    env["DTSLURM_RUN_ROOT"] = str(tmp_path / "homes" / "runs")
    old = os.umask(umask)
    try:
        for words in (
            ("trust",),
            ("submit", "--wait", "--cluster", "local", "-l", "single", "-t", "1", "train.py"),
            ("status",),
            ("diagnose",),
        ):
            done = run_dtslurm(words, cwd=folder, env=env, timeout=120)
            assert done.returncode == 0, done.stderr
    finally:
        os.umask(old)
    kept = [path for path in (tmp_path / "homes").rglob("*") if not path.is_symlink()]
    assert len(kept) > 20
    runs = tmp_path / "homes" / "runs"
    own = [path for path in kept if runs not in path.parents]  # a run's folder keeps others out of all in it
    open_to_others = [path for path in own if path.lstat().st_mode & 0o022]
    assert open_to_others == []
    folders = [path for path in own if path.is_dir()] + [
        runs,
        *(path for path in runs.iterdir() if path.is_dir()),
    ]
    assert [path for path in folders if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
@pytest.mark.parametrize("make", [make_folders, make_own_folder])
def test_make_folders_creates_every_level_private(
    tmp_path: Path, make: Callable[[Path], None], umask: int
) -> None:
    old = os.umask(umask)
    try:
        make(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_open_directory_is_closed_and_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o775)
    make_own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    give_away(folder, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        make_own_folder(folder)


@pytest.mark.parametrize(
    "how", ["another user's", "writable by all", "writable by the group", "a link", "a pipe"]
)
def test_files_planted_by_other_users_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "known.json"
    if how == "a pipe":
        os.mkfifo(path, 0o600)
    elif how == "a link":
        (tmp_path / "other").write_text("{}")
        path.symlink_to("other")
    else:
        path.write_text("{}")
        path.chmod({"writable by all": 0o666, "writable by the group": 0o660}.get(how, 0o600))
    if how == "another user's":
        give_away(path, monkeypatch)
    for look in (read_own_file, check_own_file):
        with pytest.raises(OSError):  # noqa: PT011 (the kinds differ)
            look(path)


def test_python_path_planted_for_a_login_node_is_not_used(tmp_path: Path) -> None:
    """The cached data of a login node names a program that runs there as the user."""
    from dtslurm.services.wiring import login_node

    path = tmp_path / "sites" / "x.json"
    path.parent.mkdir()
    values = {"host": "x", "home": "/home/me", "user": "me", "python": "/tmp/planted", "seen_at": 1.0}
    path.write_text(json.dumps(values))
    path.chmod(0o600)
    known = login_node._read(path)
    assert known is not None
    assert known.python == "/tmp/planted"
    path.chmod(0o666)
    assert login_node._read(path) is None


OPEN = "every user could replace the files of your runs: "


def submit(tmp_path: Path, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "project"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("print('trained')\n")
    env = {**os.environ, "DTSLURM_RUN_ROOT": str(root), "DTSLURM_LOCAL_STATE": str(tmp_path / "local")}
    asked = words or ("submit", "--cluster", "local", "-l", "single", "-t", "1", "train.py")
    return run_dtslurm(asked, cwd=folder, env=env, timeout=120)


@pytest.mark.parametrize("inside", ["", "runs", "a/b/runs"])
def test_run_root_in_a_world_writable_directory_is_refused(tmp_path: Path, inside: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    root = shared / inside if inside else shared
    done = submit(tmp_path, root)
    assert done.returncode == 2
    assert f"{OPEN}{shared}" in done.stderr
    assert "hint: set another run root with --run-root" in done.stderr
    assert not [*root.rglob("job.json")]
    assert f"{OPEN}{shared}" in submit(tmp_path, root, "doctor", "--cluster", "local").stdout
    shared.chmod(0o1777)
    assert submit(tmp_path, root).returncode == 0


def test_run_root_behind_a_symbolic_link_is_checked(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "runs").mkdir(parents=True)
    shared.chmod(0o777)
    (tmp_path / "runs").symlink_to(shared / "runs")
    assert OPEN in submit(tmp_path, tmp_path / "runs").stderr


def test_run_root_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "theirs"
    root.mkdir(mode=0o777)
    root.chmod(0o1777)
    assert swappable(os.fsencode(root)) == ""
    give_away(root, monkeypatch)
    assert swappable(os.fsencode(root)) == (
        f"{root} belongs to another user, who could replace the files of your runs"
    )
    if os.geteuid() == 0:
        assert "belongs to another user" in submit(tmp_path, root).stderr
        assert "belongs to another user" in submit(tmp_path, root, "doctor", "--cluster", "local").stdout
