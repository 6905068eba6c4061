"""Frames, known hosts and configurations, without a host."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.errors import HostUnavailable, LoginRefused
from dtslurm.transport import disk, remote_command
from dtslurm.transport.ssh import known_hosts, ssh_config, ssh_errors
from dtslurm.transport.ssh.known_hosts import KeyCheck
from tests.sshd.servers import make_key, program
from tests.waiting import wait_until

NONCE = "0123456789abcdef" * 2
BEGIN = f"\x1e{NONCE}-begin 77\x1e".encode()
END = f"\x1e{NONCE}-end 3 -\x1e".encode()
BEGIN_ERR = f"\x1e{NONCE}-begin\x1e".encode()
END_ERR = f"\x1e{NONCE}-end\x1e".encode()


@given(
    noise=st.binary(max_size=40),
    payload=st.lists(
        st.sampled_from([b"\x1e", NONCE.encode(), b"-end", b"-begin ", b"\n", b"x"]) | st.binary(),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_call_outputs_extract_the_payload_from_any_chunks(
    noise: bytes, payload: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(payload)
    whole = noise + BEGIN + data + END + b"trailing"
    if f"\x1e{NONCE}-begin ".encode() in noise + b"\x1e" or f"\x1e{NONCE}-end".encode() in data:
        return
    answer = remote_command.CallOutputs(NONCE)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    out = b"".join(answer.feed(whole[a:b], b"")[0] for a, b in pairwise(edges))
    assert out == data
    assert answer.pid == 77
    assert answer.verdict() == (3, "-")


def test_call_is_complete_when_both_outputs_have_ended() -> None:
    answer = remote_command.CallOutputs(NONCE)
    answer.feed(BEGIN + END, b"")
    states = [answer.ended]
    assert answer.feed(b"", BEGIN_ERR + b"why" + END_ERR)[1] == b"why"
    assert [*states, answer.ended] == [False, True]


def test_output_line_is_returned_at_once() -> None:
    answer = remote_command.CallOutputs(NONCE)
    answer.feed(BEGIN, b"")
    assert answer.feed(b"line\n", b"")[0] == b"line\n"


def test_truncated_output_is_not_complete() -> None:
    for length in range(len(END)):
        answer = remote_command.CallOutputs(NONCE)
        answer.feed(BEGIN + b"data" + END[:length], BEGIN_ERR + END_ERR)
        assert not answer.ended


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
        min_size=1,
        max_size=5,
    )
)
def test_f22_remote_command_line_is_safe_for_any_shell(words: list[str]) -> None:
    line = remote_command.call(["printf", *words], env={"A": words[0]}, limit=3, stdin=False).line
    assert line.isascii()
    assert line.isprintable()
    assert "!" not in line
    assert line.count("'") == 4
    assert line.count("\\") == line.count("\\0")


# ---- keys of hosts


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("keys")
    try:
        return [make_key(folder / f"key{number}") for number in range(2)]
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("names", "host", "port", "verdict"),
    [
        ("host", "host", 22, KeyCheck.KNOWN),
        ("other,host", "host", 22, KeyCheck.KNOWN),
        ("HOST", "host", 22, KeyCheck.KNOWN),
        ("host", "host", 2222, KeyCheck.KNOWN),
        ("[host]:2222", "host", 2222, KeyCheck.KNOWN),
        ("[host]:2222", "host", 22, KeyCheck.UNKNOWN),
        ("*.site.org", "login1.site.org", 22, KeyCheck.KNOWN),
        ("login?.site.org", "login12.site.org", 22, KeyCheck.UNKNOWN),
        ("*.site.org,!login2.site.org", "login2.site.org", 22, KeyCheck.UNKNOWN),
        ("[*.site.org]:2222", "login1.site.org", 2222, KeyCheck.KNOWN),
        ("hos", "host", 22, KeyCheck.UNKNOWN),
    ],
)
def test_known_hosts_names_match(
    keys: list[str], names: str, host: str, port: int, verdict: KeyCheck
) -> None:
    kind, key = keys[0].split()
    lines = list(known_hosts.read(f"# a comment\n\n{names} {keys[0]} me@here\n", "file"))
    assert known_hosts.judge(lines, host, port, kind, key)[0] is verdict


def test_changed_and_revoked_host_keys_are_recognized(keys: list[str]) -> None:
    kind, key = keys[0].split()
    changed = list(known_hosts.read(f"host {keys[1]}\n", "f"))
    assert known_hosts.judge(changed, "host", 22, kind, key) == (KeyCheck.CHANGED, "f:1")
    both = [*changed, *known_hosts.read(f"host {keys[0]}\n", "g")]
    assert known_hosts.judge(both, "host", 22, kind, key) == (KeyCheck.KNOWN, "g:1")
    revoked = [*both, *known_hosts.read(f"@revoked * {keys[0]}\n", "h")]
    assert known_hosts.judge(revoked, "host", 22, kind, key) == (KeyCheck.REVOKED, "h:1")
    # the key of a host at its usual port says nothing against another server at another port
    assert known_hosts.judge(changed, "host", 2222, kind, key)[0] is KeyCheck.UNKNOWN
    authority = list(known_hosts.read(f"@cert-authority * {keys[0]}\n", "f"))
    assert known_hosts.judge(authority, "host", 22, kind, key)[0] is KeyCheck.UNKNOWN


def test_hashed_known_hosts_names_match(keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"host {keys[0]}\n[host]:2222 {keys[1]}\n")
    subprocess.run([program("ssh-keygen"), "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    text = file.read_text()
    assert "host" not in text
    lines = list(known_hosts.read(text, "f"))
    assert known_hosts.judge(lines, "host", 22, *keys[0].split())[0] is KeyCheck.KNOWN
    assert known_hosts.judge(lines, "host", 2222, *keys[1].split())[0] is KeyCheck.KNOWN
    assert known_hosts.judge(lines, "host", 22, *keys[1].split())[0] is KeyCheck.CHANGED
    assert known_hosts.judge(lines, "hosts", 22, *keys[0].split())[0] is KeyCheck.UNKNOWN


# ---- configuration for paramiko


def test_ssh_config_includes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "me")
    folder = tmp_path / ".ssh"
    (folder / "config.d").mkdir(parents=True)
    (folder / "config.d/a").write_text("Host a\n  User from-a\n")
    (folder / "config.d/b").write_text("Host b\n  Port 2222\n  ProxyJump x@j1:22,j2\n")
    (folder / "config").write_text(
        "Include config.d/*\nUser everywhere\nHost c\n  Include none-such\n  Port 3\n"
    )
    config = ssh_config.load(None)
    result = {name: ssh_config.lookup(config, name) for name in "abc"}
    assert (result["a"].user, result["a"].port) == ("from-a", 22)
    assert (result["b"].user, result["b"].port, result["b"].jumps) == ("everywhere", 2222, ("x@j1:22", "j2"))
    assert result["c"].port == 3
    assert ssh_config.lookup(config, "z@[::1]:99").port == 99
    assert ssh_config.lookup(config, "a", "asked").user == "asked"


def test_ssh_config_that_includes_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"Include {tmp_path}/config\nHost a\n  Port 5\n")
    assert ssh_config.lookup(ssh_config.load(str(tmp_path / "config")), "a").port == 5


# ---- words


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "ssh: connect to host h port 22: No route to host",
            HostUnavailable,
            "there is no network route to h",
        ),
        ("ssh: connect to host h port 22: Connection timed out", HostUnavailable, "h did not answer"),
        (
            "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures",
            LoginRefused,
            "too many keys",
        ),
        ("me@h: Permission denied (publickey,gssapi-with-mic).", LoginRefused, "publickey, gssapi-with-mic"),
        ("Password change required but no TTY available.", LoginRefused, "no longer valid"),
        (
            "Unable to negotiate with 1.2.3.4 port 22: no matching cipher found.",
            LoginRefused,
            "cryptographic",
        ),
        (
            (
                "ssh: connect to host 10.0.0.1 port 22: Connection refused\r\n"
                "banner exchange: Connection to UNKNOWN port 65535: Broken pipe"
            ),
            HostUnavailable,
            "the jump host 10.0.0.1 refused the connection",
        ),
        (
            (
                "ssh: Could not resolve hostname gate.site: Name or service not known\r\n"
                "kex_exchange_identification: Connection closed by remote host\r\n"
                "Connection closed by UNKNOWN port 65535"
            ),
            HostUnavailable,
            "the name of the jump host gate.site cannot be resolved",
        ),
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", HostUnavailable, "h refused the"),
        ("something new", HostUnavailable, "cannot connect to h over SSH"),
        ("", HostUnavailable, "cannot connect to h over SSH"),
        ("debug1: timed out\nsomething new", HostUnavailable, "cannot connect to h over SSH"),
    ],
)
def test_ssh_error_messages_are_explained(said: str, kind: type[HostUnavailable], words: str) -> None:
    error = ssh_errors.explain("h", said, code=255)
    assert type(error) is kind
    assert words in error.message
    assert error.evidence


@pytest.mark.parametrize(
    "said", ["dd: fsync failed for '/x': Disk quota exceeded", "mv: /x: Disc quota exceeded\n"]
)
def test_quota_error_of_the_login_node_is_recognized(said: str) -> None:
    number = disk.number_of(said)
    assert disk.is_full(number)
    error = disk.refusal(number, said, "/x", "write", free_space="file system /", host="login")
    assert error.message == "quota exceeded: cannot write login:/x"
    assert "quota -s" in error.hint


def test_free_space_is_read_from_df() -> None:
    blocks = "Filesystem 1024-blocks Used Available Capacity Mounted on\nnas:/x 2048 1024 1024 50% /my home"
    inodes = "Filesystem Inodes IUsed IFree IUse% Mounted on\nnas:/x 100 10 90 10% /my home"
    assert disk.room_of(blocks, inodes) == "file system /my home: 1.0 MiB of 2.0 MiB free, 90 of 100 files"
    assert disk.room_of(blocks, "") == "file system /my home: 1.0 MiB of 2.0 MiB free"
    assert disk.room_of("", "") == "its file system cannot be examined"


@pytest.mark.parametrize("ending", ["TERM", "HUP", "outputs closed"])
def test_f16_interrupted_put_leaves_no_file(tmp_path: Path, ending: str) -> None:
    argv = remote_command.put_argv(str(tmp_path / "file"), 0o600, 1000)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as shell:
        assert shell.stdin
        assert shell.stderr
        wait_until(lambda: list(tmp_path.iterdir()), "the temporary file")
        if ending == "outputs closed":  # when dd has printed its figures, before the shell complains
            shell.stdin.close()
            said = b""
            while b"copied" not in said:
                said += shell.stderr.read(1)
            shell.stderr.close()
        else:
            os.killpg(shell.pid, signal.Signals[f"SIG{ending}"])
    assert shell.returncode == 1
    assert list(tmp_path.iterdir()) == []
