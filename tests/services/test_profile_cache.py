"""A checked profile is remembered until a file that it was read from, or a folder looked in, changes."""

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """A work folder and its user's environment, with a clock that says all was written long ago."""
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000 * 10**9)
    (tmp_path / "cluster_profiles").mkdir()
    env = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return tmp_path, env


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_is_what_was_read(name: str, place: tuple[Path, dict[str, str]]) -> None:
    cwd, env = place
    fresh = profiles.load(name, cwd=cwd, env=env)
    assert profile_cache.load(name, cwd=cwd, env=env).profile == fresh.profile
    assert len(list(profile_cache.folder(env).glob("*.json"))) == 1
    again = profile_cache.load(name, cwd=cwd, env=env)
    assert (again.profile, again.path, again.origins) == (fresh.profile, fresh.path, fresh.origins)


def without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the files were read")

    monkeypatch.setattr(profiles, "load", refuse)


def write(cwd: Path, text: str, name: str = "mine") -> Path:
    path = cwd / "cluster_profiles" / f"{name}.yaml"
    path.write_text(text)
    return path


def test_a_second_look_reads_nothing(
    place: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd, env = place
    write(cwd, "extends: slurm\nslurm: {account: one}\n")
    profile_cache.load("mine", cwd=cwd, env=env)
    without_reading(monkeypatch)
    assert profile_cache.load("mine", cwd=cwd, env=env).profile.slurm.account == "one"


def test_a_change_is_seen_in_the_file_in_what_it_extends_and_in_one_that_goes_before(
    place: tuple[Path, dict[str, str]],
) -> None:
    cwd, env = place
    own = cwd / "home/.config/dtslurm/cluster_profiles"
    own.mkdir(parents=True)
    (own / "base.yaml").write_text("extends: slurm\nslurm: {account: one, qos: a}\n")
    path = write(cwd, "extends: base\nslurm: {partition: p}\n")

    def seen() -> tuple[str | None, str | None, str | None]:
        customs = profile_cache.load("mine", cwd=cwd, env=env).profile.slurm
        return customs.partition, customs.account, customs.qos

    assert seen() == ("p", "one", "a")
    path.write_text("extends: base\nslurm: {partition: q}\n")
    assert seen() == ("q", "one", "a")
    (own / "base.yaml").write_text("extends: slurm\nslurm: {account: two, qos: a}\n")
    assert seen() == ("q", "two", "a")
    write(cwd, "extends: slurm\nslurm: {account: three}\n", name="base")
    assert seen() == ("q", "three", None)
    path.unlink()
    with pytest.raises(ProfileNotFound):
        seen()


def test_what_others_may_write_to_by_now_is_refused_though_it_is_remembered(
    place: tuple[Path, dict[str, str]],
) -> None:
    cwd, env = place
    path = write(cwd, "extends: slurm\n")
    profile_cache.load("mine", cwd=cwd, env=env)
    path.chmod(0o666)
    with pytest.raises(ProfileInvalid, match="every user can write"):
        profile_cache.load("mine", cwd=cwd, env=env)


def test_what_was_written_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "cluster_profiles").mkdir()
    write(tmp_path, "extends: slurm\n")
    profile_cache.load("mine", cwd=tmp_path, env=env)
    assert not profile_cache.folder(env).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', "\0"])
def test_a_broken_cache_is_passed_over(text: str, place: tuple[Path, dict[str, str]]) -> None:
    cwd, env = place
    fresh = profile_cache.load("slurm", cwd=cwd, env=env)
    [path] = profile_cache.folder(env).glob("*.json")
    path.write_text(text)
    assert profile_cache.load("slurm", cwd=cwd, env=env).profile == fresh.profile


def test_a_cache_that_others_could_write_to_is_passed_over(place: tuple[Path, dict[str, str]]) -> None:
    cwd, env = place
    profile_cache.load("slurm", cwd=cwd, env=env)
    [path] = profile_cache.folder(env).glob("*.json")
    told = json.loads(path.read_text())
    told["profile"]["slurm"]["account"] = "planted"
    path.write_text(json.dumps(told))
    path.chmod(0o666)
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert profile_cache.load("slurm", cwd=cwd, env=env).profile.slurm.account is None
