"""Hosts with unusual settings: OpenSSH and paramiko against real SSH servers."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import cMSG_CHANNEL_CLOSE, cMSG_CHANNEL_EOF

from dtslurm.errors import (
    CommandTimeout,
    HostUnavailable,
    TransportError,
)
from tests.conftest import skip_or_fail
from tests.sshd.servers import AS_ROOT, SshLab
from tests.transport.linking import Reach, home, logins, server
from tests.waiting import busyness


def test_f19_banner_and_startup_file_output_do_not_affect_results(
    sshd_lab: SshLab, to: Reach, tmp_path: Path
) -> None:
    banner = sshd_lab.root / "banner"
    banner.write_text("*** WELCOME ***\nThe site was down yesterday.\n")
    result = server(sshd_lab, "noisy", lines=[f"Banner {banner}"])
    noise = "echo 'sourced: .bashrc'; printf 'no end of line'; echo oops >&2; printf '\\036x-begin 1\\036'\n"
    (home(sshd_lab, result.alias) / ".bashrc").write_text(noise)
    there = to("noisy")
    done = there.run(["sh", "-c", "printf out; printf err >&2; exit 5"])
    assert (done.code, done.stdout, done.stderr) == (5, "out", "err")
    there.put(b"data", str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"data"
    with there.stream(["printf", "x"]) as stream:
        assert b"".join(stream) == b"x"


def test_f20_startup_file_variables_do_not_affect_commands(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "settings")
    lines = "export SBATCH_PARTITION=x SQUEUE_STATES=F SLURM_JOB_ID=7 SLURM_CONF=/c RANK=1\n"
    lines += "export MINE='a\nSLURM_B=c'\n"
    lines += "module() { echo loaded; }; export -f module\n"
    (home(sshd_lab, "settings") / ".bashrc").write_text(lines)
    script = 'echo "$SBATCH_PARTITION,$SQUEUE_STATES,$SLURM_JOB_ID,$RANK,$SLURM_CONF,$MINE"'
    script += "; env | grep -c BASH_FUNC"
    done = to("settings").run(["sh", "-c", script])
    assert done.stdout == ",,,,/c,a\nSLURM_B=c\n0\n"


def test_programs_on_the_login_shell_path_are_found(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "modules")
    folder = home(sshd_lab, "modules") / "opt slurm/bin"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sbatch-here").write_text("#!/bin/sh\necho $SLURM_CONF\n")
    (folder / "sbatch-here").chmod(0o755)
    profile = f"echo welcome\nexport PATH='{folder}':$PATH SLURM_CONF=/opt/conf\n"
    (home(sshd_lab, "modules") / ".bash_profile").write_text(profile)
    assert to("modules").run(["sbatch-here"]).stdout == "/opt/conf\n"


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "tcsh", "fish"])
def test_f22_any_login_shell_is_supported(sshd_lab: SshLab, to: Reach, shell: str, tmp_path: Path) -> None:
    result = shutil.which(shell)
    if result is None:
        skip_or_fail(shell, "tests/sshd/install.sh")
    # sshd hands the line to the login shell as its last word: so does this
    server(sshd_lab, f"with-{shell}", lines=[f'ForceCommand exec {result} -c "$SSH_ORIGINAL_COMMAND"'])
    there = to(f"with-{shell}")
    odd = ["a b", "$HOME", "!x", "'", '"', "\\", "a\nb", "*", "~", "`id`", ""]
    done = there.run(["printf", "%s|", *odd], env={"X": "y"})
    assert done.stdout == "".join(f"{word}|" for word in odd)
    assert there.run(["sh", "-c", "cat; exit 3", "x" * 130_000], stdin=b"in").stdout == "in"
    there.put(b"\0\xff", str(tmp_path / "a b"))
    assert there.get(str(tmp_path / "a b")) == b"\0\xff"
    with pytest.raises(CommandTimeout):
        there.run(["sleep", "600"], timeout=2 * busyness())


def test_home_directory_with_spaces_and_unicode_works(sshd_lab: SshLab, to: Reach) -> None:
    odd = sshd_lab.root / "homes" / "Jürgen & Søn's 家"
    odd.mkdir(parents=True, exist_ok=True)
    server(sshd_lab, "odd-home", env={"HOME": str(odd)})
    (odd / ".bashrc").write_text("cd\n")
    there = to("odd-home")
    assert there.run(["pwd"]).stdout == f"{odd}\n"
    there.put(b"x", f"{odd}/runs/a file")
    assert there.get(f"{odd}/runs/a file") == b"x"


def test_files_are_transferred_without_sftp(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    result = server(sshd_lab, "plain")
    assert "sftp" not in (result.folder / "sshd_config").read_text()
    there = to("plain")
    there.put(b"x" * 5_000_000, str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"x" * 5_000_000


@pytest.mark.parametrize("kind", ["paramiko"])
def test_f58_refusal_whose_reason_went_to_another_thread_is_no_lost_connection(
    sshd_lab: SshLab, to: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server refuses two sessions at once, paramiko gives both reasons to one of them."""
    result = server(sshd_lab, "two-at-once")
    there = to("two-at-once")
    there.open()
    before = logins(result)
    link = there._link  # type: ignore[attr-defined]
    open_session, refusals = link.open_session, [paramiko.SSHException("Unable to open channel.")]

    def refuse_once(**options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return open_session(**options)

    monkeypatch.setattr(link, "open_session", refuse_once)
    assert there.run(["echo", "on"], timeout=60).stdout == "on\n"
    assert logins(result) == before


@pytest.mark.parametrize("kind", ["paramiko"])
def test_message_that_is_late_for_its_closed_session_does_not_end_the_connection(
    sshd_lab: SshLab, to: Reach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread may be interrupted after it made a message; sshd ends a connection that sends it too late."""
    is_made = tmp_path / "the end of the input was made"
    result = server(sshd_lab, "late")
    there = to("late")
    there.open()
    before = logins(result)
    link = there._link  # type: ignore[attr-defined]
    send, is_closed, is_sent = link._send_user_message, threading.Event(), threading.Event()

    def send_end_of_input_late(message: paramiko.Message) -> None:
        kind = message.asbytes()[:1]
        if kind == cMSG_CHANNEL_EOF:
            is_made.touch()
            assert is_closed.wait(60)
        send(message)
        if kind == cMSG_CHANNEL_CLOSE:
            is_closed.set()
        if kind == cMSG_CHANNEL_EOF:
            is_sent.set()

    monkeypatch.setattr(link, "_send_user_message", send_end_of_input_late)
    ends = 'until [ -e "$1" ]; do sleep 0.05; done; echo first'  # not before the message was made
    assert there.run(["sh", "-c", ends, "sh", str(is_made)], timeout=600).stdout == "first\n"
    assert is_sent.wait(60)
    monkeypatch.undo()
    assert [there.run(["echo", word], timeout=600).stdout for word in "abc"] == ["a\n", "b\n", "c\n"]
    assert logins(result) == before


def test_f58_commands_wait_when_the_server_limits_sessions(sshd_lab: SshLab, to: Reach) -> None:
    result = server(sshd_lab, "two-sessions", lines=["MaxSessions 2"])
    there = to("two-sessions")
    there.open()
    before = logins(result)
    answers = []

    def ask(number: int) -> None:
        answers.append(there.run(["sh", "-c", f"sleep 0.3; echo {number}"], timeout=600).stdout)

    with there.stream(["sh", "-c", "echo on; read x"]) as stream:
        assert next(stream) == b"on\n"
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [f"{number}\n" for number in range(5)]
    assert logins(result) == before, "a refused session must not become a login of its own"


def test_f58_command_fails_unstarted_when_no_session_is_free(
    sshd_lab: SshLab, to: Reach, tmp_path: Path
) -> None:
    result = server(sshd_lab, "one-session", lines=["MaxSessions 1"])
    there = to("one-session")
    there.open()
    before = logins(result)
    with there.stream(["cat"]) as stream:
        with pytest.raises(
            HostUnavailable, match=("accepts no more concurrent commands; this command was not started")
        ):
            there.run(["touch", str(tmp_path / "ran")], timeout=4 * busyness())
        stream.close_stdin()
    assert there.run(["echo", "again"], timeout=600).stdout == "again\n"
    assert not (tmp_path / "ran").exists()
    assert logins(result) == before, result.log


def test_host_with_a_forced_command_is_an_error(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "forced", lines=["ForceCommand echo This host only forwards."])
    with pytest.raises(TransportError) as caught:
        to("forced").run(["true"], timeout=20)
    assert "This host only forwards." in caught.value.evidence
    assert "unknown" in caught.value.message


@pytest.mark.skipif(not AS_ROOT, reason="only root may give sshd a PAM stack of its own")
def test_f59_host_that_drops_every_login_is_tried_at_most_twice(sshd_lab: SshLab, to: Reach) -> None:
    folder = sshd_lab.root / "pam-dropping"
    folder.mkdir(exist_ok=True)
    stack = "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_deny.so\n"
    (folder / "sshd").write_text(stack)
    bind = f'mount --bind {folder} /etc/pam.d && exec "$@"'
    result = server(
        sshd_lab, "drops", lines=["UsePAM yes"], prefix=["unshare", "--mount", "sh", "-c", bind, "sh"]
    )
    before = logins(result)
    with pytest.raises(TransportError):
        to("drops").run(["true"], timeout=20)
    assert logins(result) - before <= 2


def test_c14_endless_output_of_a_host_is_limited(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "flood", lines=["ForceCommand yes"])
    with pytest.raises(TransportError, match="prints endlessly"):
        to("flood").run(["true"], timeout=600)
