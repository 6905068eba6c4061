"""Resolve the addresses of ``--notify``, and check them with Apprise where the job's messages are sent."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import field

from dtslurm.errors import TransportError
from dtslurm.model.diagnostics import Checked, Diagnostics
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.spec import label_address, secrets_of
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.suggestions import suggest_name
from dtslurm.worker.notify.sender import hide_parts

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*|[0-9]+[A-Za-z]+)://")
_MARK = "dtslurm-notify:"
_CHECK_S = 60.0
# In / because Python searches the working directory for modules, and the files there are not trusted.
_FIND_LIBRARY = """\
cd / || exit
for python in "$@"; do
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("apprise") is None)' \\
    </dev/null 2>/dev/null && exec "$python" -
done
"""


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address to which messages are sent.

    Attributes:
        label: the address as it is shown: the name of the secret, or the URL without its secret parts.
        url: the URL of Apprise.
        name: the name of the secret; empty for a URL that was given itself.
    """

    label: str
    url: str = field(repr=False)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class NotificationPlan:
    """The messages that a run sends.

    Attributes:
        python: an interpreter with Apprise, where dtslurm runs the commands of the cluster; empty if it was
            not searched.
        from_job: whether the job itself sends messages.
    """

    addresses: tuple[Address, ...]
    python: str = ""
    from_job: bool = True

    def encode(self, name: str, cluster: str, *, with_secrets: bool = True) -> bytes:
        """Return the content of the run's private file with the addresses.

        Args:
            name, cluster: the names of the run and of its cluster.
            with_secrets: include the values of named secrets.
        """
        addresses = [
            {
                "label": address.label,
                "name": address.name,
                "url": address.url if with_secrets or not address.name else "",
            }
            for address in self.addresses
        ]
        document = {"schema": 1, "name": name, "cluster": cluster, "python": self.python}
        return json.dumps({**document, "from_job": self.from_job, "addresses": addresses}).encode()


def choose_notifications(
    context: Context, cluster: ActiveCluster, request: JobRequest, spec: JobSpec, *, is_valid: bool
) -> Checked[NotificationPlan | None]:
    """Return the messages that a request asks for, None if there are none. No diagnostic contains a URL.

    Args:
        is_valid: whether the job will be submitted; only then the addresses are checked on the cluster.

    Raises:
        TransportError: the cluster cannot be reached.
    """
    addresses = _resolve_addresses(context, request) if is_valid and request.notify else Checked(())
    if addresses.problems or not addresses.value:
        return Checked(None, addresses.diagnostics)
    if request.no_check:
        return Checked(
            NotificationPlan(addresses=addresses.value, from_job=not cluster.profile.environment.offline)
        )
    checked = _check_addresses(context, cluster, spec, addresses.value)
    return Checked(checked.value, checked.diagnostics)


def _resolve_addresses(context: Context, request: JobRequest) -> Checked[tuple[Address, ...]]:
    diagnostics = Diagnostics()
    if request.notify and request.array is not None:
        diagnostics.error("--notify sends the messages of a single job, not those of a job array or a sweep")
    addresses = []
    for text in dict.fromkeys(request.notify):
        scheme = _SCHEME.match(text)
        if scheme:
            addresses.append(Address(label=label_address(text), url=text))
        elif _NAME.fullmatch(text):
            values = diagnostics.take(secrets_of(context, [text], option="--notify"))
            addresses += [Address(label=name, url=value, name=name) for name, value in values.items()]
        else:
            diagnostics.error(
                "--notify takes the name of a secret, or a URL of Apprise such as ntfys://TOPIC"
            )
    for address in addresses:
        if problem := _find_syntax_problem(address.url):
            diagnostics.error(f"--notify {address.label}: {problem}")
    return Checked(tuple(addresses), diagnostics.diagnostics)


def _find_syntax_problem(url: str) -> str:
    scheme = _SCHEME.match(url)
    if scheme is None:
        return "its value is not a URL such as ntfys://TOPIC"
    if not re.match(r"[^/?#]", url[scheme.end() :]):
        return f"no host or token follows {scheme[0]}"
    return "" if url.isprintable() and " " not in url else "the URL contains a space or a control character"


def _check_addresses(
    context: Context, cluster: ActiveCluster, spec: JobSpec, addresses: tuple[Address, ...]
) -> Checked[NotificationPlan]:
    """Check the addresses with Apprise on the machine that runs the cluster's commands; nothing is sent."""
    diagnostics = Diagnostics()
    pythons = _list_interpreters(context, cluster, spec)
    urls = [address.url for address in addresses]
    statement = (
        f"print('\\n{_MARK}' + json.dumps(dict(module.check({json.dumps(urls)}), python=sys.executable)))"
    )
    program = inline_program(["notify.addresses"], statement).encode()
    answer = cluster.transport.run(
        ["sh", "-c", _FIND_LIBRARY, "dtslurm-notify", *pythons], stdin=program, timeout=_CHECK_S
    )
    line = next((line for line in answer.stdout.splitlines() if line.startswith(_MARK)), None)
    from_job = not cluster.profile.environment.offline
    if line is None:
        diagnostics.error(_explain_missing_library(cluster, pythons))
        return Checked(NotificationPlan(addresses=addresses, from_job=from_job), diagnostics.diagnostics)
    result = answers.parse_object(line[len(_MARK) :].encode(), "the check of --notify")
    problems, schemes, python = result.get("problems"), result.get("schemes"), result.get("python")
    if not (
        isinstance(problems, list)
        and len(problems) == len(addresses)
        and isinstance(schemes, list)
        and isinstance(python, str)
        and python.startswith("/")
    ):
        raise TransportError("the check of --notify returned no valid answer")
    for address, problem in zip(addresses, map(str, problems), strict=True):
        if problem:
            diagnostics.error(_explain_refusal(address, problem, [str(scheme) for scheme in schemes]))
    if not diagnostics.problems:
        diagnostics.note(_describe_sender(cluster, addresses, python, from_job=from_job))
    return Checked(
        NotificationPlan(addresses=addresses, python=python, from_job=from_job), diagnostics.diagnostics
    )


def _list_interpreters(context: Context, cluster: ActiveCluster, spec: JobSpec) -> list[str]:
    """Return the interpreters to search for Apprise; in a dry run, none of the project's."""
    of_job = [f"{spec.activate}/bin/python" if spec.activate else spec.python]
    if context.dry_run or spec.container or not of_job[0].startswith("/"):
        of_job = []
    if not cluster.remote:
        return [sys.executable, *of_job, "python3"]
    return list(filter(None, [cluster.access.python, *of_job, "python3"]))


def _explain_missing_library(cluster: ActiveCluster, pythons: list[str]) -> str:
    machine = f" on {cluster.transport.host}" if cluster.remote else ""
    package = "apprise" if cluster.remote else "'dtslurm[notify]'"
    return (
        f"--notify needs the Python library Apprise, which none of {', '.join(pythons)} has{machine}; "
        f"install it there: {pythons[0]} -m pip install {package}"
    )


def _explain_refusal(address: Address, problem: str, schemes: list[str]) -> str:
    scheme = address.url.partition("://")[0].lower()
    if scheme not in {*schemes, "http", "https"}:
        return f"--notify {address.label}: Apprise knows no scheme {scheme!r}{suggest_name(scheme, schemes)}"
    return f"--notify {address.label}: Apprise does not accept the URL: {hide_parts(problem, address.url)}"


def _describe_sender(
    cluster: ActiveCluster, addresses: tuple[Address, ...], python: str, *, from_job: bool
) -> str:
    labels = ", ".join(address.label for address in addresses)
    if not from_job:
        return (
            f"messages to {labels} are sent only while dtslurm looks at the run, as status --watch does: the "
            f"compute nodes of {cluster.name} have no internet (environment.offline)"
        )
    return (
        f"messages to {labels} are sent by the job with {python}, if its node reaches them; what is left is "
        "sent when dtslurm looks at the run, as status --watch does"
    )
