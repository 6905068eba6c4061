"""The preflight program: its choice of checks and its output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.preflight import main, network, ports
from dtslurm.worker.preflight.findings import Finding, finding, parse_object

ALWAYS = ["hca", "disk", "shm", "run-dir", "dns", "clock"]


@pytest.mark.parametrize(
    ("needs", "more"),
    [
        ({}, []),
        ({"gpus": 8}, ["gpus", "xid"]),
        ({"gpus": 8, "vendor": "amd"}, ["gpus"]),  # whose kernel log has no Xids
        ({"framework": "torch"}, ["framework"]),
        ({"gpus": 1, "vendor": "nvidia", "framework": "jax"}, ["gpus", "xid", "framework"]),
    ],
)
def test_checks_of_a_node_depend_on_the_needs_of_the_job(needs: Mapping[str, Any], more: list[str]) -> None:
    result = main.checks(needs, {"DTSLURM_RUN_DIR": "/r", "SLURMD_NODENAME": "n1"}, "n1", 7)
    assert [item.name for item in result] == [*ALWAYS, *more]
    assert all(item.limit_s <= main.LIMIT_S for item in result)


def test_checks_receive_their_paths_and_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def noted(name: str) -> Callable[..., list[Finding]]:
        def look(*words: Any) -> list[Finding]:
            asked.append((name, words))
            return []

        return look

    monkeypatch.setattr(network, "dns", noted("dns"))
    monkeypatch.setattr(network, "clock", noted("clock"))
    env = {"DTSLURM_RUN_DIR": str(tmp_path), "SLURMD_NODENAME": "n3", "DTSLURM_SYSFS": f"{tmp_path}/%N/sys"}
    env[network.KEY] = "key"
    looks = {item.name: item.look for item in main.checks({"rendezvous": True}, env, "head.site", 77)}
    looks["dns"]()
    looks["clock"]()
    assert asked == [("dns", ("head.site", True)), ("clock", ("head.site", 77, "key"))]
    assert [item["level"] for item in looks["run-dir"]()] == ["ok"]
    assert looks["hca"]() == ports.ports({}, f"{tmp_path}/n3/sys")


def test_preflight_program_writes_findings_between_begin_and_end_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted.json").write_text(json.dumps({"gpus": 0}))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    fine = main.Check("shm", lambda: [finding("shm", "ok", "64 GiB")])
    asked: list[Any] = []

    def checks(*words: Any) -> list[main.Check]:
        asked.append((words[0], words[2:]))
        return [fine]

    written: list[bytes] = []
    monkeypatch.setattr(main, "checks", checks)
    monkeypatch.setattr(main, "run", lambda wanted, tell: [tell(item) for item in wanted[0].look()])
    monkeypatch.setattr(os, "write", lambda _descriptor, data: written.append(data))
    monkeypatch.setattr(os, "_exit", lambda code: written.append(b"exit %d" % code))
    main.main([str(tmp_path / "wanted.json"), "n1", "7"])
    assert asked == [({"gpus": 0}, ("n1", 7))]
    lines = [parse_object(line) for line in written[:-1]]
    assert lines[0] == {"node": "n7", "begin": True}
    assert {**lines[1]} == {"node": "n7", "check": "shm", "level": "ok", "evidence": "64 GiB"}
    assert lines[2] == {"node": "n7", "end": True}
    assert written[-1] == b"exit 0"
