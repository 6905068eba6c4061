"""The dashboard in a real browser (headless Chromium)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.dashboard.browser import open_browser
from tests.e2e.conftest import Cli
from tests.processes import ends_in_time
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("cli", ["local"], indirect=True)


@contextmanager
def serving(cli: Cli, *words: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``dtslurm top --web``; yield it and the address that it prints."""
    argv = [str(Path(sys.executable).with_name("dtslurm")), "top", "--web", *words]
    with subprocess.Popen(
        argv,
        cwd=cli.folder,
        env={**os.environ, **cli.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_dashboard_is_used_in_a_browser_of_its_user_only(cli: Cli) -> None:
    job = cli.submit("-l", "single", cli.script("import time; time.sleep(600)", "pretrain.py"))
    (trap := cli.folder / "click.py").write_text("raise SystemExit('a module of the project')")

    async def use(address: str) -> None:
        async with open_browser() as page:
            await page.open(address)
            await page.wait_for("pretrain")
            await page.wait_for("hide ended")  # keys are shown when the page has the focus
            await page.press("?")
            await page.wait_for("select ranks")
            assert {host.partition(":")[0] for host in page.hosts} == {"127.0.0.1"}
            async with open_browser() as other:
                await other.open(address)
                assert "run dtslurm top --web again" in await other.text()

    with serving(cli) as (process, address):
        asyncio.run(use(address))
        # The dashboard of a closed page ends
        wait_until(lambda: not psutil.Process(process.pid).children())
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate()
        assert (process.returncode, out) == (0, "")
        assert errors == "open it in a browser, once; Ctrl-C ends the dashboard\n"
    trap.unlink()
    cli("cancel", job)


def test_options_apply_to_pages_and_no_page_outlives_the_server(cli: Cli) -> None:
    job = cli.submit("-l", "single", cli.script("import time; time.sleep(600)", "pretrain.py"))

    async def use(process: subprocess.Popen[str], address: str) -> int:
        async with open_browser() as page:
            await page.open(address)
            await page.wait_for("overview")  # the page of the job
            [dashboard] = psutil.Process(process.pid).children()
            process.kill()
            return dashboard.pid

    with serving(cli, "--read-only", job, SSH_CONNECTION="1.2.3.4 1 5.6.7.8 22") as (process, address):
        assert ends_in_time(asyncio.run(use(process, address)))
        port = address.partition("/?")[0].rpartition(":")[2]
        assert process.stderr is not None
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in process.stderr.read()
    cli("cancel", job)


def test_missing_package_is_named_with_the_command_that_installs_it(cli: Cli) -> None:
    (cli.folder / "textual_serve.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'textual_serve'\")"
    )
    cli.env["PYTHONPATH"] = str(cli.folder)
    stderr = cli("top", "--web", code=2).stderr
    assert "top --web needs the Python package textual-serve (No module named 'textual_serve')" in stderr
    assert f"{sys.executable} -m pip install 'dtslurm[web]'" in stderr


def test_wrong_options_are_refused(cli: Cli) -> None:
    assert "--web and --once exclude each other" in cli("top", "--web", "--once", code=2).stderr
    assert "--web and --json exclude each other" in cli("top", "--web", "--json", code=2).stderr
    assert "no theme 'neon'" in cli("top", "--web", "--theme", "neon", code=2).stderr
    assert "no run '12345'" in cli("top", "--web", "12345", code=3).stderr
