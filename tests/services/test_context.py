"""The cluster and transport that a command uses on a machine with its own Slurm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm import assets
from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.wiring.context import ActiveCluster, Context

Login = Callable[..., Context]


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    """A login node: its names, its Slurm's ClusterName, the user's profiles, and what ssh's aliases mean."""

    def machine(
        host: str, cluster: str = "", aliases: dict[str, str] | None = None, **profiles: str
    ) -> Context:
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))
        monkeypatch.setattr(socket, "getfqdn", lambda name: name)
        programs, folder = tmp_path / "bin", tmp_path / "cluster_profiles"
        for place in (programs, folder):
            place.mkdir(exist_ok=True)
        hosts = "".join(f"{name}) echo hostname {real};; " for name, real in (aliases or {}).items())
        last = '*) echo "hostname $last";;'
        ssh = f"#!/bin/sh\nfor last do :; done\ncase $last in {hosts}{last} esac\n"
        for name, text in {"sbatch": "#!/bin/sh\n", "ssh": ssh}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name, text in profiles.items():
            (folder / f"{name.replace('_', '-')}.yaml").write_text(text)
        (tmp_path / "slurm.conf").write_text(
            f"# ours\nClusterName={cluster} # short\n" if cluster else "# none\n"
        )
        env = {
            "HOME": str(tmp_path),
            "PATH": f"{programs}:/usr/bin:/bin",
            "SLURM_CONF": str(tmp_path / "slurm.conf"),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        return Context(cwd=tmp_path, env={**env, "DTSLURM_TRUSTED_FOLDERS": "/"})

    return machine


def test_a_login_node_of_another_cluster_is_not_used_as_the_local_cluster(login: Login) -> None:
    context = login("login1.alpha.edu", "alpha", mine="extends: slurm\nlogin: {host: beta.uni.org}\n")
    for name in ("narval", "mine"):
        assert context.cluster(name).transport.name == "openssh"
        assert context.cluster(name).automatic_transport == "openssh"
        assert "not recognized" in context.cluster(name).reached_by
    assert context.cluster("narval", "local").transport.local
    assert context.cluster("slurm").transport.local


@pytest.mark.parametrize(
    ("host", "cluster"),
    [
        ("login3.narval.alliancecan.ca", ""),
        ("login3.narval.alliancecan.ca", "tech"),  # what the machine is called is enough
        ("narval3", "narval"),
        ("narval3.narval.calcul.quebec", ""),
    ],
)
def test_a_login_node_of_the_selected_cluster_needs_no_ssh(login: Login, host: str, cluster: str) -> None:
    context = login(host, cluster)
    result = context.cluster("narval")
    assert (result.remote, result.automatic_transport) == (False, "local")
    assert cluster in result.reached_by or host in result.reached_by
    assert context.cluster("fir").remote  # its profile extends narval's


@pytest.mark.parametrize(
    ("profile", "alias", "remote"),
    [
        ("extends: narval\nlogin: {host: myalias}\n", "", False),
        ("extends: narval\nlogin: {user: me}\n", "", False),
        ("extends: slurm\nlogin: {host: myalias}\n", "", True),
        ("extends: slurm\nlogin: {host: myalias}\n", "narval.alliancecan.ca", False),
        ("extends: narval\nlogin: {host: myalias}\n", "fir.alliancecan.ca", True),
        ("extends: slurm\nlogin: {host: myalias}\nrecognise: [narv*]\n", "", False),
        ("extends: slurm\nlogin: {host: myalias, transport: openssh}\nrecognise: [narv*]\n", "", True),
        ("extends: slurm\nlogin: {host: myalias, transport: local}\n", "", False),
    ],
)
def test_a_custom_profile_is_matched_by_its_login_host_or_recognise_patterns(
    login: Login, profile: str, alias: str, remote: bool
) -> None:
    aliases = {"myalias": alias} if alias else {}
    assert login("login3", "narval", aliases, mine=profile).cluster("mine").remote is remote


def test_a_generic_cluster_name_does_not_identify_the_local_cluster(login: Login) -> None:
    context = login("login1", "linux", linux="extends: slurm\nlogin: {host: linux.uni.org}\n")
    assert context.cluster("linux").remote


def test_a_run_is_queried_over_the_transport_of_its_submission(login: Login) -> None:
    context = login("login1.alpha.edu", "alpha")

    def reached(transport: str = "", mirror: str = "") -> str:
        record = JobRecord(
            token="1", cluster="narval", name="x", run_dir="/r", phase="submitted", created_at=1.0,
            transport=transport, mirror=mirror,
        )  # fmt: skip
        return context.cluster_of(record).transport.name

    assert reached(transport="local") == "local"
    assert reached(transport="openssh", mirror="/m") == "openssh"
    assert reached() == "local"  # of a version that did not note it
    assert reached(mirror="/m") == "openssh"
    assert reached(transport="openssh") == "local"  # the record that lies on the cluster, read there
    context = login("login1.narval.alliancecan.ca", "narval")
    assert reached(mirror="/m") == "openssh"


@pytest.mark.parametrize("package", ["dtslurm", "lib/site-packages/dtslurm"])
def test_a_run_of_another_installation_uses_the_packaged_profile_of_this_installation(
    login: Login, tmp_path: Path, package: str
) -> None:
    other = tmp_path / package / "assets.py"
    packaged = (
        tmp_path / "cluster_profiles" if package == "dtslurm" else other.parent / "_data/cluster_profiles"
    )
    packaged.mkdir(parents=True, exist_ok=True)
    other.parent.mkdir(parents=True, exist_ok=True)
    other.touch()
    context = login("login1.alpha.edu", "alpha")
    context.env = {**context.env, "DTSLURM_TRUSTED_FOLDERS": ""}

    def cluster_of(profile: str) -> ActiveCluster:
        path = packaged / f"{profile}.yaml"
        path.write_text("extends: slurm\nlogin: {host: evil.example.org}\n")
        return context.cluster_of(
            JobRecord(
                token="1", cluster="slurm", name="x", run_dir="/r", phase="submitted", created_at=1.0,
                profile=str(path),
            )
        )  # fmt: skip

    assert cluster_of("slurm").path == assets.cluster_profiles() / "slurm.yaml"
    with pytest.raises(RequestInvalid, match="not trusted this profile"):
        cluster_of("theirs")  # of a later version, or nobody's
    other.unlink()
    with pytest.raises(RequestInvalid, match="not trusted this profile"):
        cluster_of("slurm")


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_ssh_to_a_cluster_without_a_login_host_is_refused(login: Login, cluster: str) -> None:
    context = login("login1.alpha.edu", "alpha")
    with pytest.raises(RequestInvalid) as caught:
        context.cluster(cluster, "openssh")
    assert list(caught.value.problems) == [
        f"cluster {cluster} cannot be reached with transport openssh: its profile has no login.host"
    ]
    assert context.cluster(cluster, "local").transport.local
