"""The behavior that every transport must have, here and on a login node behind a real sshd."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import CommandNotFound, CommandTimeout, StoreError, TransportError
from dtslurm.transport.base import Transport
from tests.processes import ends_in_time
from tests.waiting import busyness

AS_ROOT = os.geteuid() == 0
ODD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "$HOME",
    "`id`",
    "!x",
    "a\nb",
    "ü 漢字",
    "*",
    "~",
    "-n",
    "%s",
    "#",
    "\x1e",
    "@argv@",
]


def test_command_returns_its_code_and_both_outputs(there: Transport) -> None:
    done = there.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.code, done.stdout, done.stderr, done.ok) == (3, "out\n", "err\n", False)
    assert done.argv[0] == "sh"


def test_arguments_arrive_unchanged(there: Transport) -> None:
    program = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    odd = [*ODD, "a\udcffb"]
    done = there.run([sys.executable, "-c", program, *odd])
    assert done.raw == b"\0".join(map(os.fsencode, odd))


def test_very_long_command_line_arrives_completely(there: Transport) -> None:
    words = [letter * 60_000 for letter in "abcdef"]
    done = there.run(["sh", "-c", 'printf "%s\\n" "$@"; cat', "sh", *words], stdin=b"rest")
    assert done.stdout == "\n".join([*words, "rest"])


def test_too_long_argument_is_an_error(there: Transport) -> None:
    with pytest.raises(TransportError, match="could not be started"):
        there.run(["echo", "x" * 200_000])


def test_binary_data_survives(there: Transport) -> None:
    data = bytes(range(256)) * 300 + b"\r\n\x1e\x1e"
    done = there.run(["cat"], stdin=data)
    assert done.raw == data
    assert done.stdout.encode("utf-8", "surrogateescape") == data


def test_stdin_is_empty_by_default(there: Transport) -> None:
    assert there.run(["cat"], timeout=20).stdout == ""


def test_large_stdin_is_sent_in_chunks(there: Transport) -> None:
    chunk = os.urandom(1 << 20)
    total, digest = 100, hashlib.sha256()
    for _ in range(total):
        digest.update(chunk)

    def chunks() -> Iterator[bytes]:
        for _ in range(total):
            yield chunk

    done = there.run(["sha256sum"], stdin=chunks(), timeout=600)
    assert done.stdout.split()[0] == digest.hexdigest()


def test_command_may_close_its_stdin(there: Transport) -> None:
    done = there.run(["sh", "-c", "exec <&-; echo fine"], stdin=(b"x" * 100_000 for _ in range(20)))
    assert (done.code, done.stdout) == (0, "fine\n")


def test_failed_stdin_source_ends_the_command(there: Transport, tmp_path: Path) -> None:
    note = tmp_path / "whole"

    def source() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("the file is gone")

    for _ in range(10):  # the command may be starting its first process when it is killed
        with pytest.raises(ValueError, match="the file is gone"):
            there.run(["sh", "-c", f"cat >/dev/null; touch {note}"], stdin=source())
    time.sleep(0.3)
    assert not note.exists(), "the command took a part for the whole"


def test_output_larger_than_a_pipe_is_complete(there: Transport) -> None:
    done = there.run(
        [sys.executable, "-c", "import sys; sys.stderr.write('e' * 3000000); print('o' * 3000000)"]
    )
    assert (len(done.stdout), len(done.stderr)) == (3000001, 3000000)


def test_large_binary_output_is_complete(there: Transport) -> None:
    program = "import sys; d = bytes(range(256)) * 4096\nfor _ in range(60): sys.stdout.buffer.write(d)"
    done = there.run([sys.executable, "-c", program], timeout=600)
    assert hashlib.sha256(done.raw).digest() == hashlib.sha256(bytes(range(256)) * 4096 * 60).digest()


def test_missing_program_is_named(there: Transport) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program") as caught:
        there.run(["no-such-program"])
    assert there.host in caught.value.message
    assert "PATH=" in caught.value.evidence[0]


def test_non_executable_file_is_an_error(there: Transport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CommandNotFound, match="cannot be executed"):
        there.run([str(tmp_path / "file")])


def test_program_without_its_interpreter_is_an_error(there: Transport, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(CommandNotFound, match="script"):
        there.run([str(script)])


@pytest.mark.parametrize("code", [1, 124, 126, 127, 137, 255])
def test_exit_codes_of_the_command_are_returned(there: Transport, code: int) -> None:
    assert there.run(["sh", "-c", f"exit {code}"]).code == code


def test_argument_with_a_null_byte_is_an_error(there: Transport) -> None:
    with pytest.raises(TransportError):
        there.run(["echo", "a\0b"])


def test_f7_command_is_killed_with_its_children_at_the_timeout(there: Transport, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {note}; echo nearly there >&2; wait"
    with pytest.raises(CommandTimeout) as caught:
        there.run(["sh", "-c", script], timeout=4 * busyness())
    assert "nearly there" in caught.value.evidence
    assert ends_in_time(int(note.read_text()))
    assert there.run(["echo", "next"]).stdout == "next\n"


def test_detached_child_does_not_delay_the_end_of_a_command(there: Transport) -> None:
    script = "setsid sleep 30 </dev/null >/dev/null 2>&1 & echo done"
    assert there.run(["sh", "-c", script], timeout=25).stdout == "done\n"


@pytest.mark.parametrize(
    ("name", "expected_output"),
    [("SBATCH_X", ""), ("SQUEUE_STATES", ""), ("PET_X", ""), ("RANK", ""), ("SLURM_CONF", "v")],
)
def test_f20_environment_of_commands_is_scrubbed(
    there: Transport, name: str, expected_output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "v")
    if there.local:
        done = there.run(["printenv", name])
    else:  # what a start-up file over there would set
        from dtslurm.transport import remote_command

        line = remote_command.call(["printenv", name], env={}, limit=None, stdin=False).line
        done = there.run(["sh", "-c", f"export {name}=v; {line}"])
        answer = remote_command.CallOutputs(done.stdout[1:33])
        done = type(done)((), 0, answer.feed(done.raw, b"")[0].decode(), "")
    assert done.stdout.strip() == expected_output


def test_command_receives_its_environment(there: Transport) -> None:
    script = 'echo "$SLURM_JOB_ID,$SLURM_TIME_FORMAT,$SLURM_BITSTR_LEN,$LC_ALL,$MINE"'
    done = there.run(["sh", "-c", script], env={"MINE": "y 'z' ü"})
    assert done.stdout == ",%s,0,C.UTF-8,y 'z' ü\n"


def test_stream_delivers_output_as_written(there: Transport) -> None:
    with there.stream(["sh", "-c", "echo one; read x; echo two $x"]) as stream:
        assert next(stream) == b"one\n"
        stream.send(b"for you\n")
        assert b"".join(stream) == b"two for you\n"
        assert stream.ended


def test_stream_sends_its_first_input_and_closes_stdin(there: Transport) -> None:
    with there.stream(["cat"], stdin=b"a" * 300_000) as stream:
        stream.send(b"b")
        stream.close_stdin()
        assert b"".join(stream) == b"a" * 300_000 + b"b"


def test_stream_read_returns_nothing_at_its_timeout(there: Transport) -> None:
    with there.stream(["sh", "-c", "echo one; read x; echo two"]) as stream:
        assert next(stream) == b"one\n"
        assert stream.read(0.05) == b""
        assert not stream.ended
        stream.send(b"\n")
        assert next(stream) == b"two\n"


def test_closed_stream_ends_its_command(there: Transport) -> None:
    with there.stream(["sh", "-c", "echo $$; sleep 600 & wait"]) as stream:
        pid = int(next(stream))
    assert ends_in_time(pid)


def test_failed_stream_raises_its_stderr(there: Transport) -> None:
    with there.stream(["sh", "-c", "echo x; echo why >&2; exit 4"]) as stream:
        assert next(stream) == b"x\n"
        with pytest.raises(TransportError, match="code 4") as caught:
            next(stream)
    assert caught.value.evidence == ("why",)


def test_stream_of_a_missing_program_is_an_error(there: Transport) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program"), there.stream(["no-such-program"]) as stream:
        next(stream)


def test_stream_continues_despite_large_stderr(there: Transport) -> None:
    with there.stream(["sh", "-c", "head -c 3000000 /dev/zero >&2; echo end"]) as stream:
        assert b"".join(stream) == b"end\n"


def test_concurrent_commands_return_their_own_output(there: Transport) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = there.run(["sh", "-c", f"sleep 0.2; echo {number}"], timeout=600).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number}\n" for number in range(12)}


# ---- files


def test_put_creates_private_directories_and_files(there: Transport, tmp_path: Path) -> None:
    target = tmp_path / "a b" / "ü'\"$x" / "file"
    there.put(b"\xff\0", str(target))
    assert there.get(str(target)) == b"\xff\0"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (target, target.parent, target.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_empty_file_is_transferred(there: Transport, tmp_path: Path) -> None:
    there.put(b"", str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b""


def test_put_sets_the_mode(there: Transport, tmp_path: Path) -> None:
    there.put(b"x", str(tmp_path / "script"), mode=0o755)
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o755


def test_put_replaces_a_file_atomically(there: Transport, tmp_path: Path) -> None:
    target = tmp_path / "file"
    there.put(b"old", str(target))
    with target.open("rb") as reader:
        there.put(b"new" * 500_000, str(target))
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new" * 500_000
    assert list(tmp_path.iterdir()) == [target]


def test_c7_put_replaces_a_link_without_following(there: Transport, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "file").symlink_to(victim)
    there.put(b"new", str(tmp_path / "file"))
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "file").read_bytes() == b"new"


def test_put_accepts_the_longest_file_name_and_refuses_a_longer_name(
    there: Transport, tmp_path: Path
) -> None:
    there.put(b"x", str(tmp_path / ("n" * 255)))
    with pytest.raises(StoreError, match="too long"):
        there.put(b"x", str(tmp_path / ("n" * 256)))
    assert len(list(tmp_path.iterdir())) == 1


def test_put_below_a_file_is_an_error(there: Transport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder"):
        there.put(b"x", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("link", [False, True])
def test_put_over_a_directory_is_an_error_and_over_a_link_replaces_the_link(
    there: Transport, tmp_path: Path, link: bool
) -> None:
    (tmp_path / "folder").mkdir()
    if link:
        (tmp_path / "link").symlink_to("folder")
        there.put(b"x", str(tmp_path / "link"))
        assert (tmp_path / "link").read_bytes() == b"x"
    else:
        with pytest.raises(StoreError, match="folder"):
            there.put(b"x", str(tmp_path / "folder"))
    assert list((tmp_path / "folder").iterdir()) == []


def test_get_of_a_missing_file_is_an_error(there: Transport, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file") as caught:
        there.get(str(tmp_path / "none"))
    assert str(tmp_path / "none") in caught.value.message


def test_get_of_a_directory_is_an_error(there: Transport, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="it is a folder"):
        there.get(str(tmp_path))


def test_f16_put_on_a_full_disk_keeps_the_old_file_and_reports_the_space(
    there: Transport, small_disk: Path
) -> None:
    there.put(b"old", str(small_disk / "file"))
    with pytest.raises(StoreError, match="disk full") as caught:
        there.put(b"x" * 2_000_000, str(small_disk / "file"))
    assert f"file system {small_disk}: " in caught.value.evidence[1]
    assert "files" in caught.value.evidence[1]
    assert caught.value.hint
    assert (small_disk / "file").read_bytes() == b"old"
    assert len(list(small_disk.iterdir())) == 1


def test_f16_put_without_free_inodes_is_reported_as_disk_full(there: Transport, small_disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(20):  # more than the disk counts
            (small_disk / f"taken{number}").touch()
    with pytest.raises(StoreError, match="disk full"):
        there.put(b"", str(small_disk / "file"))


def test_put_on_a_read_only_file_system_is_an_error(there: Transport, small_disk: Path) -> None:
    import subprocess

    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        there.put(b"x", str(small_disk / "sub" / "file"))


@pytest.mark.skipif(AS_ROOT, reason="root may write anywhere")
def test_put_without_permission_is_an_error(there: Transport, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        there.put(b"x", str(tmp_path / "file"))
