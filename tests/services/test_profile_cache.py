"""The cache of parsed profiles, and the changes that invalidate a cached profile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.config import profiles
from dtslurm.errors import ProfileInvalid, ProfileNotFound
from dtslurm.services.wiring import profile_cache

LONG_AGO = 1_700_000_000
NAMES = sorted(path.stem for path in assets.cluster_profiles().glob("*.yaml"))


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """Return a work folder and an environment; all files count as written long ago."""
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000 * 10**9)
    (tmp_path / "cluster_profiles").mkdir()
    env = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return tmp_path, env


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_profile_equals_the_parsed_profile(
    name: str, work_folder: tuple[Path, dict[str, str]]
) -> None:
    cwd, env = work_folder
    fresh = profiles.load(name, cwd=cwd, env=env)
    assert profile_cache.load(name, cwd=cwd, env=env).profile == fresh.profile
    assert len(list(profile_cache.folder(env).glob("*.json"))) == 1
    again = profile_cache.load(name, cwd=cwd, env=env)
    assert (again.profile, again.path, again.origins) == (fresh.profile, fresh.path, fresh.origins)


def forbid_reading_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the files were read")

    monkeypatch.setattr(profiles, "load", refuse)


def write_profile(cwd: Path, text: str, name: str = "mine") -> Path:
    path = cwd / "cluster_profiles" / f"{name}.yaml"
    path.write_text(text)
    return path


def test_a_second_load_uses_the_profile_cache(
    work_folder: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd, env = work_folder
    write_profile(cwd, "extends: slurm\nslurm: {account: one}\n")
    profile_cache.load("mine", cwd=cwd, env=env)
    forbid_reading_profiles(monkeypatch)
    assert profile_cache.load("mine", cwd=cwd, env=env).profile.slurm.account == "one"


def test_a_changed_own_inherited_or_shadowing_profile_is_read_again(
    work_folder: tuple[Path, dict[str, str]],
) -> None:
    cwd, env = work_folder
    own = cwd / "home/.config/dtslurm/cluster_profiles"
    own.mkdir(parents=True)
    (own / "base.yaml").write_text("extends: slurm\nslurm: {account: one, qos: a}\n")
    path = write_profile(cwd, "extends: base\nslurm: {partition: p}\n")

    def seen() -> tuple[str | None, str | None, str | None]:
        customs = profile_cache.load("mine", cwd=cwd, env=env).profile.slurm
        return customs.partition, customs.account, customs.qos

    assert seen() == ("p", "one", "a")
    path.write_text("extends: base\nslurm: {partition: q}\n")
    assert seen() == ("q", "one", "a")
    (own / "base.yaml").write_text("extends: slurm\nslurm: {account: two, qos: a}\n")
    assert seen() == ("q", "two", "a")
    write_profile(cwd, "extends: slurm\nslurm: {account: three}\n", name="base")
    assert seen() == ("q", "three", None)
    path.unlink()
    with pytest.raises(ProfileNotFound):
        seen()


def test_a_cached_profile_that_became_writable_by_others_is_refused(
    work_folder: tuple[Path, dict[str, str]],
) -> None:
    cwd, env = work_folder
    path = write_profile(cwd, "extends: slurm\n")
    profile_cache.load("mine", cwd=cwd, env=env)
    path.chmod(0o666)
    with pytest.raises(ProfileInvalid, match="every user can write"):
        profile_cache.load("mine", cwd=cwd, env=env)


def test_a_profile_written_a_moment_ago_is_not_cached(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "cluster_profiles").mkdir()
    write_profile(tmp_path, "extends: slurm\n")
    profile_cache.load("mine", cwd=tmp_path, env=env)
    assert not profile_cache.folder(env).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', "\0"])
def test_a_malformed_profile_cache_is_ignored(text: str, work_folder: tuple[Path, dict[str, str]]) -> None:
    cwd, env = work_folder
    fresh = profile_cache.load("slurm", cwd=cwd, env=env)
    [path] = profile_cache.folder(env).glob("*.json")
    path.write_text(text)
    assert profile_cache.load("slurm", cwd=cwd, env=env).profile == fresh.profile


def test_a_profile_cache_that_others_can_write_is_ignored(work_folder: tuple[Path, dict[str, str]]) -> None:
    cwd, env = work_folder
    profile_cache.load("slurm", cwd=cwd, env=env)
    [path] = profile_cache.folder(env).glob("*.json")
    document = json.loads(path.read_text())
    document["profile"]["slurm"]["account"] = "planted"
    path.write_text(json.dumps(document))
    path.chmod(0o666)
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert profile_cache.load("slurm", cwd=cwd, env=env).profile.slurm.account is None
