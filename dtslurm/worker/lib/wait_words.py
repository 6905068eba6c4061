"""Describes in words what a thread waits for in the kernel; also for the rules of ``dtslurm diagnose``."""

import re

# A wait as `worker.stacks` describes it, "read of /data/x (folio_wait_bit)", or only the wait channel.
_WAIT = re.compile(
    r"(?P<call>[\w ]*?)(?: of (?P<file>.+?))?(?: ?\((?P<channel>[\w.]+)\))?$", re.DOTALL | re.ASCII
)
_ON_FILES = (
    (r"pread|readv?$", "reading from {}"),
    (r"pwrite|writev?$|f(?:data)?sync|ftruncate", "writing to {}"),
    (r"recv", "receiving from {}"),
    (r"send", "sending to {}"),
    (r"connect", "connecting {}"),
    (r"accept", "waiting for a connection to {}"),
    (r"flock|fcntl", "waiting for the lock of {}"),
    (r"ioctl", "waiting for the driver of {}"),
    (r"epoll", "waiting for events"),
    (r"", "waiting for {}"),
)
_WORDS = (
    (r"nanosleep", "sleeping"),
    (r"futex", "waiting for a lock"),
    (r"signal_stop|ptrace", "stopped"),
    (r"flock|fcntl|posix_lock|locks_lock", "waiting for a file lock"),
    (r"nvidia|nv_|uvm|amdgpu|kfd|drm_", "waiting for a GPU driver"),
    (r"nfs|rpc_|lustre|ll_|ldlm|ptlrpc|cl_|osc_|fuse|gpfs|ceph|beegfs", "waiting for a network file system"),
    (r"folio|page_|io_schedule|jbd2|xfs|ext4|btrfs|blk_|buffer", "waiting for a disk or file system"),
    (r"pipe", "waiting for data in a pipe"),
    (r"sk_|tcp|unix_|inet_|sock_|recv|send|connect|accept", "waiting for the network"),
    (r"wait4|waitid|do_wait$|kernel_wait", "waiting for a child process"),
    (r"poll|select", "waiting for events"),
)
_FILE_CALLS = re.compile(r"read|write|sync|openat|stat|getdents|truncate")
_NAMELESS = re.compile(r"^(socket|pipe):\[\d*\]$|^anon_inode:\[?(\w+)\]?$")


def describe_wait(waits: str) -> str:
    """Return what a thread waits for, such as ``sleeping`` or ``reading from /data/x``; empty if unknown.

    A name of the kernel without known words is part of the text.

    Args:
        waits: the thread's system call and its wait channel, or only the wait channel.
    """
    match = _WAIT.match(waits.strip())
    if match is None or waits.strip() in ("", "0"):
        return ""
    call, channel = match.group("call").strip(), match.group("channel") or ""
    if match.group("file"):
        words = next(text for pattern, text in _ON_FILES if re.search(pattern, call))
        return words.format(_NAMELESS.sub(r"a \1\2", match.group("file")))
    for pattern, words in _WORDS:
        if any(re.search(r"(?:^|_)(?:{})".format(pattern), name) for name in (call, channel)):
            return words
    if _FILE_CALLS.search(call):
        return "waiting for a file system"
    return "waiting in the kernel ({})".format(channel or call)
