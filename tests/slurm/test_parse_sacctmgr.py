"""The parser of ``sacctmgr -n -P show assoc``."""

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


def test_associations_of_several_accounts_are_parsed() -> None:
    assert associations(PRINTED) == [
        Association("lab", "", ("normal",)),
        Association("vision", "gpu", ("normal", "long"), 10, 20, Walltime(172800),
                    {"gres/gpu": 16, "node": 4}, {"node": 32}),
    ]  # fmt: skip


def test_an_association_without_limits_is_parsed() -> None:
    assert associations("lab|||||||\n") == [Association("lab")]


@given(st.text())
def test_arbitrary_text_gives_only_associations_with_an_account(text: str) -> None:
    for item in associations(text):
        assert item.account
