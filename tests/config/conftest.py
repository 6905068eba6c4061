"""A home folder and a project folder into which tests write profiles."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtslurm.config import profiles
from dtslurm.errors import ProfileInvalid


@dataclass
class ProfileFolders:
    cwd: Path
    home: Path

    @property
    def env(self) -> Mapping[str, str]:
        return {"HOME": str(self.home)}

    def project(self, name: str, text: str) -> Path:
        return self._write(self.cwd / "cluster_profiles" / f"{name}.yaml", text)

    def user(self, name: str, text: str) -> Path:
        return self._write(self.home / ".config" / "dtslurm" / "cluster_profiles" / f"{name}.yaml", text)

    def load(self, name: str) -> profiles.LoadedProfile:
        return profiles.load(name, cwd=self.cwd, env=self.env)

    def problems(self, name: str) -> list[str]:
        with pytest.raises(ProfileInvalid) as caught:
            self.load(name)
        return list(caught.value.problems)

    @staticmethod
    def _write(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        path.chmod(0o644)
        return path


@pytest.fixture
def profile_folders(tmp_path: Path) -> ProfileFolders:
    home = tmp_path / "home"
    cwd = tmp_path / "work"
    home.mkdir()
    cwd.mkdir()
    return ProfileFolders(cwd, home)
