"""Attacks by the files of a project: which code they may run, and which secrets they may read."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.config import files
from dtslurm.errors import ProfileInvalid, RequestInvalid
from dtslurm.services.clusters import profile_file
from dtslurm.services.wiring.context import Context
from tests.warm import run_dtslurm

Run = Callable[..., subprocess.CompletedProcess[str]]
PROFILE = "scheduler: local\n"
FILES = {
    "dtslurm.yaml": "defaults:\n  nodes: 1\n",
    "cluster_profiles/here.yaml": PROFILE,
    "templates/rank.sh.j2": (assets.templates() / "rank.sh.j2").read_text(),
    "job.yaml": "script: train.py\n",
}
WORDS = {
    "dtslurm.yaml": ("submit", "--dry-run", "--cluster", "local", "train.py"),
    "cluster_profiles/here.yaml": ("render", "--cluster", "here", "train.py"),
    "templates/rank.sh.j2": ("render", "--cluster", "local", "train.py"),
    "job.yaml": ("render", "--cluster", "local", "job.yaml"),
}
ASKS = {
    "secrets": "  secrets: [GITHUB_TOKEN]\n",
    "setup": "  setup: ['touch {proof}']\n",
    "teardown": "  teardown: ['touch {proof}']\n",
    "env": "  env: {{AWS_SECRET_ACCESS_KEY: }}\n",
    "tracking": "  tracking: {{uri: 'https://thief.example'}}\n  tracker: [mlflow]\n",
    "template": "  template: other.sbatch.j2\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir(mode=0o755)
    write(folder, "train.py", "print('trained')\n")
    return folder


@pytest.fixture
def run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``dtslurm`` for a user who trusts nothing yet."""
    monkeypatch.delenv("DTSLURM_TRUSTED_FOLDERS", raising=False)

    def call(*words: str, code: int | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DTSLURM_LOCAL_STATE": str(tmp_path / "local"), **more}
        done = run_dtslurm(words, cwd=project, env=env, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    path.write_text(text)
    path.chmod(0o644)
    return path


def give_away(path: Path, how: str) -> None:
    if how == "another user's":
        os.chown(path, 65534, 65534)
    else:
        path.chmod({"writable by all": 0o666, "writable by a group": 0o664}[how])
        if how == "writable by a group":
            shared = (
                [65534] if os.geteuid() == 0 else [item for item in os.getgroups() if item != os.getgid()]
            )
            if not shared:  # this user has no group with others
                path.chmod(0o666)
            else:
                os.chown(path, -1, shared[0])


@pytest.mark.parametrize("how", ["another user's", "writable by all", "writable by a group"])
@pytest.mark.parametrize("name", FILES)
def test_project_file_writable_by_other_users_is_refused(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    path = write(project, name, FILES[name])
    if how == "another user's" and os.geteuid():  # only root can give a file away
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ProfileInvalid, match=r"belongs to .*, and its content runs in your jobs"):
            files.read(path, path.name)
        return
    give_away(path, how)
    done = run(*WORDS[name], code=2)
    assert "its content runs in your jobs" in done.stderr
    assert path.name in done.stderr
    assert "hint: review the file, then run: " in done.stderr

    command = done.stderr.partition("then run: ")[2].strip()  # the hint works
    if command.startswith("chmod"):
        subprocess.run(command, shell=True, check=True, cwd=project)
    else:
        run(*command.split()[1:], code=0)
    run(*WORDS[name], code=0)


def file(mode: int, user: int = 1000, group: int = 1000) -> Any:
    return SimpleNamespace(st_mode=0o100000 | mode, st_uid=user, st_gid=group)


@pytest.mark.parametrize(
    ("file_status", "env", "user", "reason_part"),
    [
        (file(0o600), {}, 1000, None),
        (file(0o644, user=0), {}, 1000, None),
        (file(0o644, user=1001), {}, 1000, "belongs to"),
        (file(0o644), {}, 0, "belongs to"),
        (file(0o644), {"SUDO_UID": "1000"}, 0, None),
        (file(0o644, user=1001), {"SUDO_UID": "1000"}, 0, "belongs to"),
        (file(0o644, user=1001), {"SUDO_UID": "1001"}, 1000, "belongs to"),  # a variable is no permission
        (file(0o664), {}, 1000, None),  # the group that is the user's alone
        (file(0o664, group=2000), {}, 1000, "member of the group team"),
        (file(0o664, group=3000), {}, 1000, "member of the group shared"),
        (file(0o664, group=4000), {}, 1000, "member of the group with number 4000"),
        (file(0o646), {}, 1000, "every user"),
    ],
)
def test_distrust_reason_follows_owner_and_mode(
    file_status: Any, env: dict[str, str], user: int, reason_part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(number: int) -> Any:
        known = {1000: ("me", []), 2000: ("team", ["me"]), 3000: ("shared", [])}
        name, members = known[number]
        return SimpleNamespace(gr_name=name, gr_mem=members)

    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(grp, "getgrgid", group)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me"))
    why = files.find_distrust_reason(file_status, env)
    assert (why is None) == (reason_part is None)
    assert (reason_part or "") in (why or "")


@pytest.mark.parametrize("what", ASKS)
def test_project_setting_that_runs_code_or_reads_secrets_requires_trust(
    project: Path, run: Run, tmp_path: Path, what: str
) -> None:
    proof = tmp_path / "proof"
    path = write(project, "dtslurm.yaml", "defaults:\n  nodes: 1\n" + ASKS[what].format(proof=proof))
    write(project, "other.sbatch.j2", "{% extends 'base.sbatch.j2' %}\n")
    words = ("submit", "--wait", "--cluster", "local", "-l", "single", "-t", "1", "train.py")
    done = run(*words, code=2, GITHUB_TOKEN="gold", AWS_SECRET_ACCESS_KEY="gold")
    assert f"you have not trusted this setting: dtslurm.yaml:3: defaults.{what}" in done.stderr
    assert "hint: review the file, then run: dtslurm trust" in done.stderr
    assert not proof.exists()
    assert json.loads(run("status", "--json", code=0).stdout)["runs"] == []

    looked = run(
        "submit", "--dry-run", *words[2:], code=0, GITHUB_TOKEN="gold", AWS_SECRET_ACCESS_KEY="gold"
    )  # looking is free
    assert f"dtslurm.yaml:3: defaults.{what}" in looked.stderr
    assert not proof.exists()

    result = run("trust", code=0)
    assert f"trusted  {path}  (defaults.{what}" in result.stderr
    if what == "template":
        assert "other.sbatch.j2" in result.stderr
    run("submit", "--parsable", *words[2:], code=0, GITHUB_TOKEN="gold", AWS_SECRET_ACCESS_KEY="gold")
    assert f"known  {path}" in run("trust", code=0).stderr

    path.write_text(path.read_text().replace("nodes: 1", "nodes: 1\n  job_name: other"))  # asks for no more
    run("submit", "--parsable", *words[2:], code=0, GITHUB_TOKEN="gold", AWS_SECRET_ACCESS_KEY="gold")
    path.write_text(
        path.read_text() + "  setup: [touch more]\n" if what != "setup" else "defaults: {setup: [x]}\n"
    )
    assert "you have not trusted this setting" in run(*words, code=2).stderr


def test_project_profile_requires_trust_and_names_the_profile_that_it_replaces(
    project: Path, run: Run, tmp_path: Path
) -> None:
    path = write(project, "cluster_profiles/local.yaml", "extends: local\ntitle: another\n")
    words = ("--cluster", "local", "-l", "single", "-t", "1", "train.py")
    done = run("submit", "--parsable", *words, code=2)
    assert f"you have not trusted this profile: {path}" in done.stderr
    looked = run("submit", "--dry-run", *words, code=0)
    assert f"{path} is used in place of " in looked.stderr
    [command] = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    run(*command.partition("dtslurm ")[2].split(), code=0)
    assert "is used in place of" in run("submit", *words, code=0).stderr
    path.write_text(path.read_text() + "login: {host: thief.example}\nscheduler: slurm\n")
    assert "you have not trusted this profile" in run("status", "--cluster", "local").stderr


@pytest.mark.parametrize("words", [("render",), ("submit", "--dry-run"), ("submit",)])
def test_no_command_connects_to_a_host_from_an_untrusted_project_profile(
    project: Path, run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    proof, programs = tmp_path / "proof", tmp_path / "programs"
    ssh = write(programs, "ssh", f"#!/bin/sh\ntouch {proof}\nexit 255\n")
    ssh.chmod(0o755)
    text = "extends: slurm\nlogin: {host: thief.example, transport: openssh}\n"
    write(project, "cluster_profiles/there.yaml", text)
    path = f"{programs}:{os.environ['PATH']}"
    done = run(*words, "--cluster", "there", "-t", "1", "train.py", code=2, PATH=path)
    assert "you have not trusted this profile" in done.stderr
    assert not proof.exists()
    run("trust", code=0)
    run(*words, "--cluster", "there", "-t", "1", "train.py", PATH=path)
    assert proof.exists() or words == ("render",)  # the stand-in for ssh would have told


def test_project_template_requires_trust(project: Path, run: Run, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    text = "{% extends 'base.sbatch.j2' %}\n{% block setup %}touch " + str(proof) + "\n{% endblock %}\n"
    path = write(project, "templates/single.sbatch.j2", text)
    write(project, "dtslurm.yaml", "defaults:\n  template: templates/single.sbatch.j2\n")
    words = ("submit", "--parsable", "--cluster", "local", "-l", "single", "-t", "1", "train.py")
    assert "defaults.template" in run(*words, code=2).stderr
    run("trust", "dtslurm.yaml", code=0)
    done = run(*words, code=2)
    assert f"you have not trusted this project's template {path}" in done.stderr
    assert not proof.exists()
    run("trust", code=0)
    run(*words, code=0)
    path.write_text(text.replace("touch", "rm"))
    assert "you have not trusted" in run(*words, code=2).stderr


@pytest.mark.parametrize("ask", ["secrets: [GITHUB_TOKEN]", "env: {GITHUB_TOKEN: }"])
@pytest.mark.parametrize("where", ["job.yaml", "more.yaml"])
def test_job_file_that_reads_secrets_of_the_user_requires_trust(
    project: Path, run: Run, where: str, ask: str
) -> None:
    write(project, "more.yaml", "time: '1'\n")
    write(project, "job.yaml", "extends: more.yaml\nscript: train.py\ncluster: local\nlauncher: single\n")
    run("submit", "--parsable", "job.yaml", code=0)  # it asks for nothing
    path = project / where
    path.write_text(f"{path.read_text()}{ask}\n")
    done = run("submit", "--parsable", "job.yaml", code=2, GITHUB_TOKEN="gold")
    assert "you have not trusted job.yaml, which sets " in done.stderr
    assert "GITHUB_TOKEN" in done.stderr
    result = run(*done.stderr.partition("then run: dtslurm ")[2].split(), code=0)
    assert f"trusted  {project / 'job.yaml'}  (job file)" in result.stderr
    run("submit", "--parsable", "job.yaml", code=0, GITHUB_TOKEN="gold")


@pytest.mark.parametrize("known", [True, False])
def test_discovered_profile_is_trusted_unless_it_amends_an_untrusted_profile(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.delenv("DTSLURM_TRUSTED_FOLDERS")
    context = Context(cwd=project)
    path = project / "cluster_profiles" / "ours.yaml"
    if not known:
        write(project, "cluster_profiles/ours.yaml", "extends: local\n")
    path.parent.mkdir(exist_ok=True)
    profile_file.save(context, path, "extends: local\ntitle: ours\n")
    with contextlib.nullcontext() if known else pytest.raises(RequestInvalid, match="not trusted"):
        Context(cwd=project).cluster("ours")


def test_directories_can_be_trusted_by_an_environment_variable(project: Path, run: Run) -> None:
    write(project, "dtslurm.yaml", "defaults:\n  setup: ['true']\n")
    words = ("submit", "--parsable", "--cluster", "local", "-l", "single", "-t", "1", "train.py")
    run(*words, code=2, DTSLURM_TRUSTED_FOLDERS=f"{project}/other")
    run(*words, code=2, DTSLURM_TRUSTED_FOLDERS=".")  # a relative path could mean any folder
    run(*words, code=0, DTSLURM_TRUSTED_FOLDERS=f"/nowhere:{project}")


@pytest.mark.parametrize("how", ["a folder that others may write to", "a link"])
def test_trust_entries_that_other_users_can_change_are_ignored(
    project: Path, run: Run, tmp_path: Path, how: str
) -> None:
    write(project, "dtslurm.yaml", "defaults:\n  setup: ['true']\n")
    run("trust", code=0)
    entries = tmp_path / "state" / "dtslurm" / "trusted"
    words = ("submit", "--parsable", "--cluster", "local", "-l", "single", "-t", "1", "train.py")
    run(*words, code=0)
    if how == "a link":
        entries.rename(tmp_path / "planted")
        entries.symlink_to(tmp_path / "planted")
    else:
        entries.chmod(0o777)
    run(*words, code=2)
