"""The local transport against real processes and a real disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import CommandNotFound, CommandTimeout, StoreError, TransportError
from dtslurm.transport.local import LocalTransport, scrubbed

HERE = LocalTransport()
AS_ROOT = os.geteuid() == 0


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie waiting for init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_soon(pid: int) -> bool:
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_command_gives_its_code_and_both_outputs() -> None:
    done = HERE.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.code, done.stdout, done.stderr, done.ok) == (3, "out\n", "err\n", False)
    assert done.argv[0] == "sh"


def test_bytes_that_are_no_text_survive() -> None:
    done = HERE.run(["cat"], stdin=b"a\xff\x00b\r\n")
    assert done.stdout.encode("utf-8", "surrogateescape") == b"a\xff\x00b\r\n"


def test_stdin_is_empty_unless_given() -> None:
    assert HERE.run(["cat"], timeout=5).stdout == ""


def test_output_larger_than_any_pipe() -> None:
    done = HERE.run([sys.executable, "-c", "import sys; sys.stderr.write('e' * 300000); print('o' * 300000)"])
    assert (len(done.stdout), len(done.stderr)) == (300001, 300000)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(CommandNotFound, match="no-such-program") as caught:
        HERE.run(["no-such-program"])
    assert "PATH=" in caught.value.evidence[0]


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CommandNotFound):
        HERE.run([str(tmp_path / "file")])


def test_an_argument_that_no_process_can_take() -> None:
    with pytest.raises(TransportError):
        HERE.run(["echo", "a\0b"])


def test_a_time_out_ends_the_whole_group_and_keeps_what_was_said(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; echo nearly there >&2; wait"
    start = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        HERE.run(["sh", "-c", script], timeout=0.5)
    assert time.monotonic() - start < 10
    assert "nearly there" in caught.value.evidence
    assert gone_soon(int(note.read_text()))


def test_a_stray_that_holds_the_pipe_does_not_hold_us() -> None:
    start = time.monotonic()
    with pytest.raises(CommandTimeout):
        HERE.run(["sh", "-c", "setsid sleep 8 & sleep 60"], timeout=0.3)
    assert time.monotonic() - start < 7


def test_a_caller_that_is_interrupted_leaves_no_command_behind(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import signal, threading
from dtslurm.transport.local import LocalTransport
main = threading.main_thread().ident
threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
LocalTransport().run(["sh", "-c", "echo $$ > {note}; sleep 60"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    assert gone_soon(int(note.read_text()))


@pytest.mark.parametrize(
    "name",
    ["SBATCH_PARTITION", "SQUEUE_STATES", "SLURM_JOB_ID", "SLURM_TIME_FORMAT", "PET_X",
     "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD", "BASH_ENV",
     "BASH_FUNC_module%%", "CUDA_VISIBLE_DEVICES"],
)  # fmt: skip
def test_what_would_bend_commands_is_left_out(name: str) -> None:
    assert name not in scrubbed({name: "x"})


def test_what_says_which_slurm_is_meant_stays() -> None:
    kept = {"SLURM_CONF": "a", "SLURM_CLUSTERS": "b", "SLURM_JWT": "c", "PATH": "d", "RANKING": "e"}
    assert scrubbed(kept) == kept


def test_the_environment_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "F")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    done = HERE.run(
        ["sh", "-c", 'echo "$SQUEUE_STATES,$SLURM_TIME_FORMAT,$SLURM_BITSTR_LEN,$LC_ALL,$MINE"'],
        env={"MINE": "y"},
    )
    assert done.stdout == ",%s,0,C.UTF-8,y\n"


def test_a_stream_comes_as_it_is_written() -> None:
    with HERE.stream(["sh", "-c", "echo one; sleep 0.2; echo two"]) as chunks:
        assert next(chunks) == b"one\n"
        assert b"".join(chunks) == b"two\n"


def test_leaving_a_stream_ends_its_command() -> None:
    with HERE.stream(["sh", "-c", "echo $$; sleep 60 & wait"]) as chunks:
        pid = int(next(chunks))
    assert gone_soon(pid)


def test_a_stream_that_fails_tells_why() -> None:
    with HERE.stream(["sh", "-c", "echo x; echo why >&2; exit 4"]) as chunks:
        assert next(chunks) == b"x\n"
        with pytest.raises(TransportError, match="code 4") as caught:
            next(chunks)
    assert caught.value.evidence == ("why",)


def test_a_stream_is_not_stopped_by_much_stderr() -> None:
    with HERE.stream(["sh", "-c", "head -c 300000 /dev/zero >&2; echo end"]) as chunks:
        assert b"".join(chunks) == b"end\n"


def test_put_makes_private_folders_and_files(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    HERE.put(b"\xff\0", str(target))
    assert HERE.get(str(target)) == b"\xff\0"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (target, target.parent, target.parent.parent)] == [
        0o600, 0o700, 0o700,
    ]  # fmt: skip


def test_put_gives_the_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        HERE.put(b"x", str(tmp_path / "script"), mode=0o755)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o755


def test_put_replaces_at_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    HERE.put(b"old", str(target))
    with target.open("rb") as reader:
        HERE.put(b"new", str(target))
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_put_does_not_write_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "file").symlink_to(victim)
    HERE.put(b"new", str(tmp_path / "file"))
    assert victim.read_bytes() == b"mine"


def test_a_name_with_no_room_for_a_suffix(tmp_path: Path) -> None:
    HERE.put(b"x", str(tmp_path / ("n" * 255)))
    with pytest.raises(StoreError, match="too long"):
        HERE.put(b"x", str(tmp_path / ("n" * 256)))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder"):
        HERE.put(b"x", str(tmp_path / "file" / "below"))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="folder"):
        HERE.put(b"x", str(tmp_path / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        HERE.get(str(tmp_path / "none"))


@pytest.mark.skipif(AS_ROOT, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        HERE.put(b"x", str(tmp_path / "file"))


@pytest.mark.skipif(not AS_ROOT, reason="only root may become somebody else")
def test_no_permission_as_another_user(tmp_path: Path) -> None:
    code = (
        "import os\nfrom dtslurm.transport.local import LocalTransport\nos.setuid(65534)\n"
        f"LocalTransport().put(b'x', '{tmp_path}/file')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "permission denied" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; without the right to mount, the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=10", "tmpfs", str(folder)]
    if not AS_ROOT or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    HERE.put(b"old", str(small_disk / "file"))
    with pytest.raises(StoreError, match="disk full") as caught:
        HERE.put(b"x" * 200_000, str(small_disk / "file"))
    assert str(small_disk) in caught.value.evidence[1]
    assert "free" in caught.value.evidence[1]
    assert caught.value.hint
    assert (small_disk / "file").read_bytes() == b"old"
    assert len(list(small_disk.iterdir())) == 1


def test_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        HERE.put(b"x", str(small_disk / "sub" / "file"))


def test_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def refuse(_handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)  # quotas of network file systems often refuse only here
    with pytest.raises(StoreError, match="quota exceeded") as caught:
        HERE.put(b"x", str(tmp_path / "file"))
    assert "quota -s" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
