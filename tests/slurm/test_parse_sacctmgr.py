"""What ``sacctmgr -n -P show assoc`` prints, and what follows from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.units import Walltime
from dtslurm.slurm.parse_sacctmgr import Association, associations

# As 22.05 prints it: account, partition, QOS, MaxJobs, MaxSubmit, MaxWall, MaxTRES, GrpTRES.
PRINTED = """\
lab||normal|||||
vision|gpu|normal,long|10|20|2-00:00:00|gres/gpu=16,node=4|node=32,mem=4000G
"""


def test_a_user_with_two_accounts() -> None:
    assert associations(PRINTED) == [
        Association("lab", "", ("normal",)),
        Association("vision", "gpu", ("normal", "long"), 10, 20, Walltime(172800),
                    {"gres/gpu": 16, "node": 4}, {"node": 32}),
    ]  # fmt: skip


def test_without_limits_nothing_is_known_of_them() -> None:
    assert associations("lab|||||||\n") == [Association("lab")]


@given(st.text())
def test_a_banner_does_no_harm(text: str) -> None:
    for one in associations(text):
        assert one.account
