"""Quotas: the output of quota commands, and the resulting messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dtslurm.services.preflight import quota

# quota -wp (4.06, ext4) and lfs quota -q (2.15); a name too long for its column stands alone
LINUX = """\
Disk quotas for user ann (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda1  {used}  20480000  25600000  {grace}    {files}  90000   100000       0
"""
LUSTRE = """\
/lustre/scratch/a-long-name
                {used}  20480000 25600000       -    {files}   90000  100000       -
"""


def quota_output(text: str, used: str, files: str, grace: str = "0") -> str:
    return "\n".join(
        f"quota={line}" for line in text.format(used=used, files=files, grace=grace).splitlines()
    )


@pytest.mark.parametrize("text", [LINUX, LUSTRE])
@pytest.mark.parametrize(
    ("used", "files", "problems", "notices"),
    [
        ("1000", "10", 0, 0),
        ("25600000*", "10", 1, 1),
        ("25595000*", "10", 1, 1),
        ("22000000*", "10", 0, 1),
        ("1000", "99950*", 1, 1),
        ("25600000*", "100000*", 2, 2),
    ],
)
def test_f14_a_quota_without_room_is_reported_before_submission(
    text: str, used: str, files: str, problems: int, notices: int
) -> None:
    output = quota_output(text, used, files)
    assert len(list(quota.problems(output))) == problems
    assert len(list(quota.notices(output))) == notices


@pytest.mark.parametrize(
    "output",
    [
        "",
        "quota=",
        "quota=Disk quotas for user ann (uid 1): none",
        "free=9 9 9 9 9 9 9 9 9",
        quota_output(LINUX, "x", "y"),
    ],
)
def test_without_a_quota_there_is_no_message(output: str) -> None:
    assert [*quota.problems(output), *quota.notices(output)] == []


def test_a_limit_of_zero_is_no_quota() -> None:
    assert list(quota.problems("quota=/dev/sda1 99999999 0 0 0 99999999 0 0 0")) == []


@pytest.mark.parametrize(("kind", "command"), [("ext2/ext3", "quota"), ("lustre", "lfs")])
def test_the_quota_command_of_the_file_system_is_called(tmp_path: Path, kind: str, command: str) -> None:
    for name, body in (
        ("stat", f"echo {kind}"),
        ("quota", 'echo "$0 $*" >&2; [ "$1" = -wp ] && echo "/dev/sda1 9* 0 10 0 9 0 10 0"'),
        ("lfs", '[ "$1" = quota ] && echo "/dev/sda1 9* 0 10 - 9 0 10 -"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / ("lfs" if command == "quota" else "quota")).write_text("#!/bin/sh\nexit 1\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "root": str(tmp_path)}
    done = subprocess.run(["sh", "-c", quota.QUERY], env=env, capture_output=True, text=True, check=True)
    assert len(list(quota.problems(done.stdout))) == 2
    assert done.stderr == ""
