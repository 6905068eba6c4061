"""``dtslurm notebook`` with a real Jupyter, on the suite's real Slurm."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli
from tests.e2e.test_forward import forwarded
from tests.frameworks.conftest import Activated
from tests.frameworks.envs import environment
from tests.waiting import busyness

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def cli(activated: Activated) -> Cli:
    return activated(environment("jupyter", ["jupyter-server==2.21.1", "ipykernel==7.1.0"]))


def ask(url: str, token: str, *, starts: bool = False) -> Any:
    """Return the answer of Jupyter's kernels; start one first if asked."""
    request = urllib.request.Request(url, method="POST" if starts else "GET")
    request.add_header("Authorization", f"token {token}")
    with urllib.request.urlopen(request, timeout=60 * busyness()) as answer:
        return json.load(answer)


def test_notebook_needs_its_token_keeps_it_over_a_requeue_and_ends_when_idle(cli: Cli) -> None:
    words = ["--cluster", "slurm", "-t", "10", "--idle", "0:40", "--requeue"]
    with forwarded(cli, *words, command="notebook") as forward:
        forward.wait_for("submitted notebook")
        [job] = re.findall(r"submitted notebook (\S+) to", forward.text)
        cli.started.append(job)
        forward.wait_for("?token=")
        [(base, token)] = re.findall(r"^(http://127\.0\.0\.1:\d+/)\?token=(\S+)$", forward.text, re.MULTILINE)
        kernels = f"{base}api/kernels"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(kernels, "wrong")
        assert ask(kernels, token) == []
        kernel = ask(kernels, token, starts=True)
        assert [item["id"] for item in ask(kernels, token)] == [kernel["id"]]
        folder = cli.run_dir(job).path / "session"
        for name in ("token", "session.json"):
            assert (folder / name).stat().st_mode & 0o777 == 0o600
        assert_token_is_only_in(folder.parent, token, {"token", "session.json"})
        cli("requeue", job)
        forward.wait_for("connected", 1)
        assert ask(kernels, token) == []  # the same port and token, without the kernel
        status = cli.wait_for_end(job, limit=300)["statuses"][0]
        assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), forward.text
        assert forward.process.wait(120 * busyness()) == 0


def assert_token_is_only_in(folder: Path, token: str, names: set[str]) -> None:
    found = {
        path.name for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()
    }
    assert found <= {*names, *(name for name in found if name.startswith("jpserver-"))}
    assert names <= found
