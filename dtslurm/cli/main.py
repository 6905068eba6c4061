"""The ``dtslurm`` command: imports subcommands when they run, turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import click

import dtslurm
from dtslurm.errors import DtslurmError, JobFailed
from dtslurm.interrupts import EXIT_CODE, ExitAtInterrupt

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name -> (module:object, help text), so that --help need not import the commands
COMMANDS: Mapping[str, tuple[str, str]] = {
    "init": ("dtslurm.cli.setup.init:init", "Set up a folder in five questions, and run a first job."),
    "submit": ("dtslurm.cli.commands.submit:submit", "Check, render and queue a training script."),
    "render": ("dtslurm.cli.commands.submit:render", "Print the sbatch script without queuing it."),
    "status": ("dtslurm.cli.commands.status:status", "Show your runs and their states."),
    "logs": ("dtslurm.cli.commands.logs:logs", "Show the output of all ranks or of selected ranks."),
    "top": (
        "dtslurm.cli.commands.top:top",
        "Open the live dashboard of all your runs.",
    ),
    "exec": (
        "dtslurm.cli.commands.exec:exec_",
        "Run a command or a shell inside a running job.",
    ),
    "profile": ("dtslurm.cli.commands.exec:profile", "Show where the ranks of a job spend their time."),
    "forward": (
        "dtslurm.cli.commands.forward:forward_",
        "Forward ports of this machine to a running job.",
    ),
    "diagnose": (
        "dtslurm.cli.commands.diagnose:diagnose",
        "Find the first rank that failed, its cause, and a fix.",
    ),
    "report": ("dtslurm.cli.commands.report:report", "Write an HTML report about a run."),
    "compare": (
        "dtslurm.cli.commands.compare:compare",
        "Compare runs: results, speed, differences.",
    ),
    "fetch": ("dtslurm.cli.commands.fetch:fetch", "Download logs, checkpoints and results of a run."),
    "artifacts": (
        "dtslurm.cli.commands.artifacts:artifacts",
        "List, pin and download checkpoints and results.",
    ),
    "cancel": ("dtslurm.cli.commands.control:cancel", "Cancel runs."),
    "scale": (
        "dtslurm.cli.commands.control:scale",
        "Change the number of instances of roles.",
    ),
    "requeue": ("dtslurm.cli.commands.control:requeue", "Requeue runs under the same job id."),
    "resubmit": (
        "dtslurm.cli.commands.resubmit:resubmit",
        "Submit a run again, also from its checkpoints.",
    ),
    "sweep": (
        "dtslurm.cli.commands.sweep:sweep",
        "Show a sweep's trials and results; rerun failed trials.",
    ),
    "alloc": ("dtslurm.cli.commands.alloc:alloc", "Hold an allocation, in which scripts start at once."),
    "notebook": ("dtslurm.cli.commands.session:notebook", "Run Jupyter in a job, and open it here."),
    "code": ("dtslurm.cli.commands.session:code", "Work in a job with an editor that uses SSH."),
    "hold": ("dtslurm.cli.commands.control:hold", "Hold pending runs."),
    "release": ("dtslurm.cli.commands.control:release", "Release held runs."),
    "plan": (
        "dtslurm.cli.commands.plan:plan",
        "Plan how to split a model over a cluster.",
    ),
    "usage": (
        "dtslurm.cli.commands.usage:usage",
        "Show GPU-hours requested, allocated, used and idle.",
    ),
    "clean": (
        "dtslurm.cli.commands.clean:clean",
        "Delete the code of ended runs, or whole runs.",
    ),
    "cluster": ("dtslurm.cli.setup.cluster:cluster", "List, show, discover and check cluster profiles."),
    "trust": ("dtslurm.cli.setup.trust:trust", "Trust a project's hosts, secrets and setup lines."),
    "completion": (
        "dtslurm.cli.setup.completion:completion",
        "Print the shell completion for bash, zsh or fish.",
    ),
    "manual": ("dtslurm.cli.setup.manual:manual", "Print the manual page."),
    "doctor": ("dtslurm.cli.setup.doctor:doctor", "Check this machine and the cluster in use."),
}


class LazyGroup(click.Group):
    """A click group that imports a command only when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in the order of everyday use."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        with ExitAtInterrupt():
            command: click.Command = getattr(importlib.import_module(module), name)
            if not command.epilog:
                from dtslurm.cli.examples import add_examples

                add_examples(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from `COMMANDS`, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions for the commands and for the options of ``dtslurm`` itself."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; for an unknown name, suggest the most similar one."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from dtslurm.suggestions import suggest_name

            ctx.fail(f"No such command {name!r}{suggest_name(name, COMMANDS)}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, is_requested: bool) -> None:
    del param
    if not is_requested or ctx.resilient_parsing:
        return
    from pathlib import Path

    checkout_state = ""
    if (Path(dtslurm.__file__).parents[1] / ".git").exists():
        from dtslurm.services.clusters.git_version import state_of_checkout

        checkout_state = state_of_checkout()
    click.echo(f"dtslurm {dtslurm.__version__}{checkout_state}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version.",
)
def cli() -> None:
    """Launch training scripts on any Slurm cluster, and show what every rank is doing."""


def main() -> NoReturn:
    """Run the command line and exit with its exit code."""
    try:
        code = cli.main(prog_name="dtslurm", complete_var="_DTSLURM_COMPLETE", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.Abort:
        code = EXIT_CODE
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        # The reader closed the pipe (| head). Redirect stdout so that the interpreter's flush at exit does
        # not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = EXIT_CODE
    except DtslurmError as error:
        from dtslurm.cli.printing.output import show_error

        show_error(error)
        code = error.code if isinstance(error, JobFailed) else error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
