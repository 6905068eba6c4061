"""Small files of JSON that several programs share: read without errors, and replaced atomically.

The content may be missing, truncated, or written by a program that is not trusted. `sampler.py` and
`trial.py` have a copy of this module beside them in the run directory.
"""

import contextlib
import errno
import json
import math
import os
import stat
from typing import Any, Dict, Iterable, Iterator, Optional, Union

LARGEST = 1e100  # squares and sums of larger numbers overflow
LARGEST_WHOLE = 1 << 63


def number(value: Any) -> Optional[float]:
    """Return a number as a float, also NaN or an infinity; None for any other value, such as a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def finite_number(value: Any) -> Optional[float]:
    """Return a finite number as a float; None for any other value, also for one beyond `LARGEST`."""
    decoded = number(value)
    return decoded if decoded is not None and abs(decoded) < LARGEST else None


def whole_number(value: Any) -> Optional[int]:
    """Return an integer of at most 64 bits; None for any other value, also for a boolean and for ``2.0``."""
    return value if type(value) is int and abs(value) < LARGEST_WHOLE else None


def parse_object(text: Union[bytes, str]) -> Dict[str, Any]:
    """Return the JSON object in a text; empty if the text is anything else."""
    try:
        value = json.loads(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def open_file(path: Union[bytes, str]) -> int:
    """Return a descriptor of a regular file for reading, without blocking on a FIFO.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_object(path: Union[bytes, str]) -> Dict[str, Any]:
    """Return the JSON object in a file; empty if there is none or the file cannot be read."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return parse_object(file.read())
    except OSError:
        return {}


def parse_lines(lines: Iterable[bytes]) -> Iterator[Dict[str, Any]]:
    """Yield the JSON objects on the lines; skip all other lines and empty objects."""
    return filter(None, map(parse_object, lines))


def read_lines(path: str, tail: Optional[int] = None) -> Iterator[Dict[str, Any]]:
    """Yield the objects of a JSON-lines file, or of its last ``tail`` bytes; none if it cannot be read.

    Only a newline ends a line: a path in a record may contain other line separators of Unicode.
    """
    with contextlib.suppress(OSError), os.fdopen(open_file(path), "rb") as file:
        if tail is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
        for record in parse_lines(file):
            yield record


def write_atomically(path: str, text: str, mode: Optional[int] = None, sync: bool = True) -> None:
    """Write a file under a temporary name in its folder, and rename it.

    Args:
        mode: the file's permissions; by default the umask decides.
        sync: flush the content to the disk before the rename.

    Raises:
        OSError: the file was not replaced.
    """
    draft = "{}.{}".format(path, os.urandom(4).hex())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            if mode is not None:
                os.fchmod(descriptor, mode)  # despite the umask
            if sync:
                file.flush()
                os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
