"""``dtslurm init``."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from dtslurm.cli.options import transport_option
from dtslurm.cli.printing import output
from dtslurm.cli.setup.discover import write_profile
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.destination import split_names
from dtslurm.services.wiring.context import ActiveCluster, Context

_MAX_SHOWN = 12
_LOCAL_JOB = ["--cluster", "local", "-N", "2", "--ntasks-per-node", "2"]


@click.command()
@click.argument("host", required=False)
@click.option("-p", "--partition", metavar="NAME", help="Use this partition by default.")
@click.option("-A", "--account", metavar="NAME", help="Charge jobs to this account by default.")
@click.option("--run-root", metavar="DIR", help="Store all runs in DIR, which all nodes share.")
@click.option("--demo/--no-demo", default=None, help="Run a first job also on the cluster, or run none.")
@click.option("-y", "--yes", is_flag=True, help="Accept the detected answers.")
@transport_option
def init(
    host: str | None,
    partition: str | None,
    account: str | None,
    run_root: str | None,
    demo: bool | None,
    yes: bool,
    transport: str | None,
) -> None:
    """Set up this folder: detect the cluster, ask five questions, run a first job.

    The cluster is the Slurm of this machine or of the login node HOST. Its profile is written to
    ~/.config/dtslurm/cluster_profiles, and your choices to dtslurm.yaml in this folder. The first job runs on
    this machine and, if you agree, on the cluster. Options answer the questions in advance.
    """
    from dtslurm.services.clusters import first_setup

    context, questions = Context(), _Questions(accept_defaults=yes)
    first_setup.require_no_project(context)
    cluster = _choose_cluster(context, questions, host, transport)
    if cluster is None:
        path = first_setup.save_project(context, "local")
        output.note(f"wrote {path}: jobs run on this machine, which has no Slurm")
        first_jobs = [_LOCAL_JOB]
    else:
        options = _Options(partition, account, run_root, demo, transport)
        first_jobs = _set_up_cluster(context, questions, cluster, options)
    for words in first_jobs if demo is not False else []:
        _run_first_job(words)
    output.note("next: dtslurm submit SCRIPT")


class _Options(NamedTuple):
    """The answers that options state in advance, None for the others."""

    partition: str | None
    account: str | None
    run_root: str | None
    demo: bool | None
    transport: str | None


class _Questions:
    """Asks on the terminal, unless an option has stated the answer or the detected one is accepted."""

    def __init__(self, *, accept_defaults: bool) -> None:
        self.accept_defaults = accept_defaults

    def ask(
        self, text: str, option: str, stated: str | None, default: str, check: Callable[[str], str]
    ) -> str:
        """Return the answer, which may be empty.

        Args:
            text: the question.
            option: the option or argument that states the answer in advance.
            stated: its value, None if it was not given.
            default: the detected answer.
            check: returns the problem of an answer, empty if there is none.

        Raises:
            RequestInvalid: the stated answer has a problem, or there is no terminal to ask on.
        """
        if stated is None and self.accept_defaults:
            return default
        if stated is not None:
            problem = check(stated)
            if problem:
                raise RequestInvalid([f"{option}: {problem}"])
            return stated
        self._require_terminal(text, option)

        def convert(answer: str) -> str:
            answer = answer.strip()
            problem = check(answer) if answer else ""
            if problem:
                raise click.UsageError(problem)
            return answer

        return str(click.prompt(text, default, value_proc=convert, show_default=bool(default), err=True))

    def confirm(self, text: str, option: str) -> bool:
        """Return whether the user agrees; accepting the detected answers is no agreement."""
        if self.accept_defaults:
            return False
        self._require_terminal(text, option)
        return click.confirm(text, default=False, err=True)

    def _require_terminal(self, text: str, option: str) -> None:
        if not sys.stdin.isatty():
            raise RequestInvalid(
                [f"there is no terminal for the question {text!r}"],
                hint=f"answer with {option}, or accept the detected answers with --yes",
            )


def _choose_cluster(
    context: Context, questions: _Questions, host: str | None, transport: str | None
) -> ActiveCluster | None:
    """Return the cluster behind a login node, or this machine's, or None if there is neither."""
    fallback = "the Slurm of this machine" if context.has_slurm() else "no cluster"
    text = f"Login node, as you type it after ssh (empty: {fallback})"
    host = questions.ask(text, "HOST", host, "", lambda _answer: "")
    if not host and not context.has_slurm():
        return None
    return context.cluster_without_profile(host or None, transport)


def _set_up_cluster(
    context: Context, questions: _Questions, cluster: ActiveCluster, options: _Options
) -> list[list[str]]:
    """Write the profile and the project file; return the options of the first jobs."""
    from dtslurm.services.clusters import discover, first_setup, profile_file

    host = cluster.transport.host if cluster.remote else None
    output.note(f"querying the Slurm of {host or 'this machine'}")
    discovery = discover.discover(context, cluster, discover.DiscoverOptions(probe=False), host=host)
    for line in discovery.found.notices:
        output.note(f"notice: {line}")
    first_setup.require_same_login_node(context, discovery, host)
    offers = first_setup.find_offers(context, discovery)
    run_root = questions.ask(
        "Folder for your runs, which all nodes share", "--run-root", options.run_root, offers.run_root,
        first_setup.find_run_root_problem,
    )  # fmt: skip
    partition = questions.ask(
        _format_choice("Partition", offers.partitions, offers.partition), "--partition",
        options.partition, offers.partition, lambda text: _find_unknown(text, offers.partitions, "partition"),
    )  # fmt: skip
    account = questions.ask(
        _format_choice("Account", offers.accounts, offers.account), "--account", options.account,
        offers.account, lambda text: _find_unknown(text, offers.accounts, "account of yours"),
    )  # fmt: skip
    runs_on_cluster = options.demo or (
        options.demo is None
        and questions.confirm("Run a first job of a minute on the cluster, too?", "--demo")
    )
    discovery = first_setup.state_run_root(context, discovery, offers, run_root)
    path = first_setup.find_profile_path(context, discovery.name)
    write_profile(context, path, profile_file.existing(path), discovery, yes=questions.accept_defaults)
    output.note(f"wrote {first_setup.save_project(context, discovery.name, account, partition)}")
    _report_problems(discovery.name)
    if cluster.remote:
        output.note(
            "jobs use the python3 of the cluster; if your packages are elsewhere there, set "
            f"environment.python in {path}"
        )
    words = ["--cluster", discovery.name]
    words += ["-p", partition] if partition else []
    words += ["-A", account] if account else []
    words += ["--transport", options.transport] if options.transport else []
    words += first_setup.choose_first_layout(discovery, partition)
    return [_LOCAL_JOB, *([words] if runs_on_cluster else [])]


def _format_choice(noun: str, names: Sequence[str], default: str) -> str:
    """Return a question; on the terminal, an empty answer means the default, if there is one."""
    return f"{noun} ({_list_names(names)}{'' if default else '; empty: Slurm chooses'})"


def _list_names(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}" if names else "unknown"


def _find_unknown(text: str, names: Sequence[str], noun: str) -> str:
    """Return a message about the names in a list ``a,b`` that the cluster does not have."""
    unknown = [name for name in split_names(text) if names and name not in names]
    return f"there is no {noun} {', '.join(unknown)}; available: {_list_names(names)}" if unknown else ""


def _report_problems(cluster_name: str) -> None:
    """Print what dtslurm doctor would report as missing."""
    from dtslurm.services.clusters.doctor import examine

    for finding in examine(Context(), cluster_name):
        if finding.ok is False:
            output.note(f"problem: {finding.what}: {finding.found}{f'; {finding.hint}' * bool(finding.hint)}")


def _run_first_job(words: Sequence[str]) -> None:
    """Run a small job in a copy of its own folder, and show its output.

    Raises:
        Exit: the job failed.
    """
    from dtslurm.cli.commands.submit import submit
    from dtslurm.services.clusters.first_setup import write_first_script

    with tempfile.TemporaryDirectory(prefix="dtslurm-init-") as folder, _working_directory(folder):
        script = write_first_script(Path(folder))
        arguments = [*words, "-t", "5", "-l", "srun", "--snapshot", "--follow", script]
        output.note(f"\n$ dtslurm submit {shlex.join(arguments)}")
        code = submit.main(arguments, prog_name="dtslurm submit", standalone_mode=False)
    if code:
        raise click.exceptions.Exit(code)


@contextmanager
def _working_directory(folder: str) -> Iterator[None]:
    previous = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous)
