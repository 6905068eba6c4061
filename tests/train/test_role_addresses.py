"""The addresses of other roles, as training code reads them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm import train
from dtslurm.errors import RequestInvalid


def write_state(folder: Path, *instances: dict[str, Any]) -> None:
    roles = [{"name": "rollout", "instances": list(instances)}, {"name": "judge", "instances": []}]
    draft = folder / "draft"
    draft.write_text(json.dumps({"schema": 1, "roles": roles}))
    draft.rename(folder / "roles.json")


def instance(number: int, state: str, start: int = 0) -> dict[str, Any]:
    return {
        "instance": number,
        "state": state,
        "start": start,
        "host": f"n{number}",
        "url": f"http://n{number}:30000",
        "ports": {"http": 30000},
    }


def test_role_lists_the_urls_of_the_instances_that_are_ready(tmp_path: Path) -> None:
    write_state(tmp_path, instance(0, "ready"), instance(1, "starting"), instance(2, "removed"))
    rollout = train.Role("rollout", str(tmp_path))
    assert rollout.urls == ["http://n0:30000"]
    assert [item.state for item in rollout.instances] == ["ready", "starting"]
    assert rollout.instances[0].ports == {"http": 30000}
    assert rollout.wait(0.0, min_count=1) == ["http://n0:30000"]
    with pytest.raises(TimeoutError, match="rollout-0 ready, rollout-1 starting"):
        rollout.wait(0.0)


def test_role_follows_changes_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(tmp_path))
    rollout = train.Role("rollout")  # the supervisor has written nothing yet
    assert rollout.urls == []

    def become_ready() -> None:
        time.sleep(0.3)
        write_state(tmp_path, instance(0, "ready", start=1))

    thread = threading.Thread(target=become_ready)
    thread.start()
    assert rollout.wait(60.0) == ["http://n0:30000"]
    assert rollout.instances[0].start == 1
    thread.join()


def test_unknown_role_and_missing_run_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path)
    with pytest.raises(RequestInvalid, match="no role 'rolout' beside this one, only rollout, judge"):
        train.Role("rolout", str(tmp_path))
    monkeypatch.delenv("DTSLURM_RUN_DIR", raising=False)
    with pytest.raises(RequestInvalid, match="does not belong to a run"):
        train.Role("rollout")


def test_damaged_state_counts_as_not_written_yet(tmp_path: Path) -> None:
    for text in ("", "[", "[]", '{"roles": 3}', '{"roles": [3, {"name": "rollout", "instances": [3]}]}'):
        (tmp_path / "roles.json").write_text(text)
        assert train.Role("rollout", str(tmp_path)).urls == []
