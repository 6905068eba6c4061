"""The state of roles: read from a file of another machine, and described."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.model.runs.roles import InstanceState, RoleState
from dtslurm.presentation.roles import describe_role
from dtslurm.views.role_states import parse_roles

READY = {
    "instance": 0, "state": "ready", "node": "n2", "start": 0, "restarts": 1, "changed": 5.0,
    "url": "http://n2:30000", "load": {"waiting": 2.0, "requests_per_s": 1.25, "other": 3},
}  # fmt: skip


def test_state_of_each_instance_is_read() -> None:
    [role] = parse_roles([{"name": "rollout", "instances": [READY]}])
    assert role == RoleState(
        name="rollout",
        instances=(
            InstanceState(
                number=0,
                state="ready",
                node="n2",
                start=0,
                restarts=1,
                changed=5.0,
                url="http://n2:30000",
                load={"waiting": 2.0, "requests_per_s": 1.25},
            ),
        ),
    )


@pytest.mark.parametrize(
    "roles",
    [
        None, 3, "text", [3, None, {}], [{"name": "a b"}], [{"name": 3}], [{"name": "\x1b[2J"}],
        [{"name": "a", "instances": [3, {"instance": -1}, {"instance": True}, {"instance": 10**9}]}],
    ],
)  # fmt: skip
def test_malformed_entries_are_left_out(roles: Any) -> None:
    assert all(role.instances == () for role in parse_roles(roles))


def test_hostile_values_do_not_reach_the_screen() -> None:
    hostile = {**READY, "state": "\x1b[31m", "node": "\x1b]0;x\x07", "url": 7, "load": {"waiting": "nan"}}
    [role] = parse_roles([{"name": "rollout", "instances": [hostile]}])
    assert role.instances[0] == InstanceState(number=0, start=0, restarts=1, changed=5.0)


@pytest.mark.parametrize(
    ("states", "has_ended", "text"),
    [
        (["ready", "ready"], False, "2 of 2 ready on n[0-1], 2 restarts, 2.5 requests/s, 4 waiting"),
        (
            ["ready", "starting"],
            False,
            "1 of 2 ready (1 starting) on n[0-1], 2 restarts, 2.5 requests/s, 4 waiting",
        ),
        (["ready", "removed"], False, "1 of 1 ready on n0, 2 restarts, 1.2 requests/s, 2 waiting"),
        (["ended", "failed"], True, "1 of 2 instances failed on n[0-1], 2 restarts"),
        (["ended", "ended"], True, "ended on n[0-1], 2 restarts"),
    ],
)
def test_role_is_described_in_one_line(states: list[str], has_ended: bool, text: str) -> None:
    instances = [
        {**READY, "instance": number, "state": state, "node": f"n{number}"}
        for number, state in enumerate(states)
    ]
    [role] = parse_roles([{"name": "rollout", "instances": instances}])
    assert describe_role(role, has_ended=has_ended) == text
