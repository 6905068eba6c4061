"""The words for what a thread waits for in the kernel."""

from __future__ import annotations

import pytest

from dtslurm.worker.lib.wait_words import describe_wait


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ("", ""),
        ("0", ""),
        ("nanosleep (hrtimer_nanosleep)", "sleeping"),
        ("nanosleep", "sleeping"),
        ("hrtimer_nanosleep", "sleeping"),
        ("(hrtimer_nanosleep)", "sleeping"),
        ("futex (futex_wait_queue)", "waiting for a lock"),
        ("futex_wait_queue_me", "waiting for a lock"),
        ("__futex_wait", "waiting for a lock"),
        ("poll (do_poll.constprop.0)", "waiting for events"),
        ("select (poll_schedule_timeout)", "waiting for events"),
        ("epoll_wait of anon_inode:[eventpoll] (ep_poll)", "waiting for events"),
        ("ep_poll", "waiting for events"),
        ("wait4 (do_wait)", "waiting for a child process"),
        ("do_wait", "waiting for a child process"),
        ("read of pipe:[71] (anon_pipe_read)", "reading from a pipe"),
        ("anon_pipe_read", "waiting for data in a pipe"),
        ("recvfrom of socket:[99] (sk_wait_data)", "receiving from a socket"),
        ("sk_wait_data", "waiting for the network"),
        ("read of /lustre/shard-7 (ll_file_read)", "reading from /lustre/shard-7"),
        ("read of /data/a of b (copy) (folio_wait_bit)", "reading from /data/a of b (copy)"),
        ("fsync of /scratch/model.pt", "writing to /scratch/model.pt"),
        ("flock of /home/me/lock", "waiting for the lock of /home/me/lock"),
        ("ioctl of /dev/nvidia0", "waiting for the driver of /dev/nvidia0"),
        ("openat (rpc_wait_bit_killable)", "waiting for a network file system"),
        ("stat (nfs_wait)", "waiting for a network file system"),
        ("openat", "waiting for a file system"),
        ("folio_wait_bit_common", "waiting for a disk or file system"),
        ("os_acquire_nvidia_lock", "waiting for a GPU driver"),
        ("do_signal_stop", "stopped"),
        ("system call 281 (hangs_here)", "waiting in the kernel (hangs_here)"),
        ("system call 999", "waiting in the kernel (system call 999)"),
        ("wait_woken", "waiting in the kernel (wait_woken)"),
        ("read of ", "waiting for a file system"),
        ("\x1b[1m", ""),
    ],
)
def test_wait_in_the_kernel_is_described_in_words(waits: str, words: str) -> None:
    assert describe_wait(waits) == words
