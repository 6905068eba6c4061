"""How ``ray start`` is run on a slow machine, without Ray."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker import ray_start

TIMEOUT = "RAY_agent_register_timeout_ms"
ANSWER = {"node_manager_port": 1}


class Services:
    """What ray_start uses of Ray's module of this name: a node whose process ends or lasts."""

    def __init__(self, command: str, *, failures: int) -> None:
        self.command, self.failures, self.calls = command, failures, 0
        self.commands: list[list[str]] = []

    def start_ray_process(self, command: list[str], process_type: str, *, fate_share: bool) -> Any:
        assert fate_share
        self.commands.append(command)
        del process_type
        return SimpleNamespace(process=subprocess.Popen([sys.executable, "-c", self.command]))

    def get_node(self, address: str) -> dict[str, int]:
        assert address == "address"
        self.calls += 1
        if self.calls <= self.failures:
            raise RuntimeError("no node yet")
        return ANSWER


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "POLL_S", 0.01)


def choose(*words: str) -> dict[str, str]:
    chosen = ray_start.choose_agent_ports(list(words), set(ray_start.AGENT_PORTS))
    assert chosen[: len(words)] == list(words)
    return dict(word.split("=") for word in chosen[len(words) :])


def test_agents_get_free_ports_that_differ() -> None:
    ports = choose("--head")
    assert tuple(ports) == ray_start.AGENT_PORTS
    assert len(set(ports.values())) == 4
    assert all(1024 <= int(port) <= 65535 for port in ports.values())


@pytest.mark.parametrize("word", ["--metrics-export-port=8080", "--metrics-export-port"])
def test_port_of_the_user_is_kept(word: str) -> None:
    names = [name for name in ray_start.AGENT_PORTS if name != "--metrics-export-port"]
    assert list(choose(word)) == names


def test_options_that_this_ray_does_not_have_are_left_out() -> None:
    [option] = ray_start.choose_agent_ports([], {"--head", "--metrics-export-port"})
    assert option.startswith("--metrics-export-port=")


def test_node_gets_the_port_that_its_agent_will_have() -> None:
    services = Services("", failures=0)
    ray_start.wait_longer_for_node(services, 60, "4321")
    for name in ("raylet", "log_monitor"):
        services.start_ray_process([name], name, fate_share=True).process.wait()
    assert services.commands == [
        ["raylet", "--dashboard_agent_listen_port=4321", "--undefok=dashboard_agent_listen_port"],
        ["log_monitor"],
    ]


def test_node_may_take_as_long_as_the_limit() -> None:
    services = Services("import time; time.sleep(60)", failures=30)
    ray_start.wait_longer_for_node(services, 60, "0")
    process = services.start_ray_process(["raylet"], "raylet", fate_share=True).process
    assert services.get_node("address") == ANSWER
    assert services.calls == 31
    process.kill()
    process.wait()


def test_node_that_takes_longer_than_the_limit_is_an_error_of_ray() -> None:
    services = Services("import time; time.sleep(60)", failures=10**9)
    ray_start.wait_longer_for_node(services, 0.1, "0")
    process = services.start_ray_process(["raylet"], "raylet", fate_share=True).process
    with pytest.raises(RuntimeError, match="no node yet"):
        services.get_node("address")
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("C node_manager.cc: no port\nstack\n", "C node_manager.cc: no port"), ("", "it printed no error")],
)
def test_node_that_ends_while_it_starts_ends_the_program_with_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    errors = tmp_path / "raylet.err"
    errors.write_text(text)
    services = Services("", failures=10**9)
    ray_start.wait_longer_for_node(services, 600, "0")
    command = ["raylet", f"--stderr_filepath={errors}"]
    services.start_ray_process(command, "raylet", fate_share=True).process.wait()
    with pytest.raises(SystemExit, match=f"Ray's node ended while it started: {reason}"):
        services.get_node("address")


def test_reason_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for command in (["raylet"], ["raylet", f"--stderr_filepath={tmp_path / 'none'}"]):
        assert ray_start.find_reason(command) == "its errors cannot be read"


def test_release_of_ray_without_such_a_wait_is_left_as_it_is() -> None:
    services = SimpleNamespace(start_ray_process=len)
    ray_start.wait_longer_for_node(services, 60, "0")
    assert services.start_ray_process is len


class Ray:
    """Ray, as far as the program uses it: the options of this release, and what it was started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        self.words: list[str] = []
        self.waits: list[tuple[object, float, str]] = []
        self.services = SimpleNamespace(start_ray_process=None)
        parameters = [SimpleNamespace(opts=[name]) for name in ("--head", *options)]
        scripts = SimpleNamespace(start=SimpleNamespace(params=parameters), main=self.start)
        for name, values in (
            ("ray", {}),
            ("ray._private", {"services": self.services}),
            ("ray.scripts", {"scripts": scripts}),
        ):
            module: Any = ModuleType(name)
            module.__dict__.update(values)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys, "argv", ["ray_start.py"])
        monkeypatch.setattr(os, "environ", {TIMEOUT: "5"})
        monkeypatch.setattr(ray_start, "wait_longer_for_node", lambda *words: self.waits.append(words))

    def start(self) -> None:
        self.words = list(sys.argv)


def test_program_gives_ray_its_limit_and_the_same_port_as_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch, ray_start.LISTEN_PORT)
    ray_start.main(60, ["--head", "--block"])
    assert ray.words[:-1] == ["ray", "start", "--head", "--block"]
    name, _, port = ray.words[-1].partition("=")
    assert name == ray_start.LISTEN_PORT
    assert ray.waits == [(ray.services, 60, port)]
    assert os.environ == {
        "RAY_NUM_REDIS_GET_RETRIES": "60",
        TIMEOUT: "5",  # of the user
    }


@pytest.mark.parametrize(
    ("words", "port"),
    [([], "0"), (["--dashboard-agent-listen-port=4", "--dashboard-agent-listen-port=5"], "5")],
)
def test_port_that_the_program_does_not_choose_is_rays_or_the_last_of_the_user(
    monkeypatch: pytest.MonkeyPatch, words: list[str], port: str
) -> None:
    ray = Ray(monkeypatch, *ray_start.AGENT_PORTS[2:])
    os.environ.clear()
    ray_start.main(60, words)
    assert ray.words[: 2 + len(words)] == ["ray", "start", *words]
    assert ray.waits == [(ray.services, 60, port)]
    assert os.environ[TIMEOUT] == "60000"


def test_program_is_run_with_its_limit_and_the_words_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["ray_start.py", "60", "--head", "--block"])
    runpy.run_path(ray_start.__file__, run_name="__main__")
    assert ray.words == ["ray", "start", "--head", "--block"]
    assert os.environ["RAY_NUM_REDIS_GET_RETRIES"] == "60"


def test_node_is_asked_for_until_the_limit_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(ray_start, "time", clock)
    monkeypatch.setattr(ray_start, "POLL_S", 0.5)
    services = Services("", failures=10**9)
    ray_start.wait_longer_for_node(services, 10, "0")
    with pytest.raises(RuntimeError, match="no node yet"):
        services.get_node("address")
    assert services.calls == 22
