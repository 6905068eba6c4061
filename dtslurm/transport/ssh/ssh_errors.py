"""Converts ssh's error messages into errors with a hint for the user. Pure."""

from __future__ import annotations

import re

from dtslurm.errors import HostUnavailable, LoginRefused, TransportError
from dtslurm.model.values import dataclass

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_SHOWN_KEY = re.compile(r"Server host key: \S+ (SHA256:\S+)")
CHATTER = re.compile(r"debug\d: |OpenSSH_\d|Authenticated (?:to|using) |Transferred: |Bytes per second: ")
_NOT_EVIDENCE = re.compile(r"^\s*$|^@+$|^Connection closed by UNKNOWN port")
_MAX_EVIDENCE = 12
# _PROXY_MARK is in the message about a connection through another program; if that program is an ssh, its own
# message (_UNREACHED) names the host that it could not reach.
_PROXY_MARK = "UNKNOWN port"
_UNREACHED = re.compile(
    r"^ssh: (?:connect to host|Could not resolve hostname) ([^\s:]+)(?=[\s:])", re.MULTILINE | re.IGNORECASE
)


@dataclass(frozen=True)
class Rule:
    """A kind of failure.

    Attributes:
        pattern: matches ssh's message.
        message: the error's message.
        hint: what the user can do.
        refused: whether a retry without a change would fail again.
    """

    pattern: str
    message: str
    hint: str
    refused: bool = False


# The first match applies. The failure of a jump host comes before that of the connection through it.
_RULES = (
    Rule(
        r"REVOKED HOST KEY DETECTED|host key is revoked|was revoked",
        "the host key of {host} was revoked",
        "do not log in; ask the cluster's support",
        refused=True,
    ),
    Rule(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed|differs from the key for",
        "the host key of {host} has changed{shown}: an attacker may intercept the connection",
        "ask the cluster's support whether the key was changed, and compare the fingerprint; if it "
        "matches, remove the old key with `ssh-keygen -R NAME` (the evidence names file and line), "
        "then run `ssh {host}` once",
        refused=True,
    ),
    Rule(
        r"Host key verification failed|No \S+ host key is known for",
        "the host key of {host} is not known on this machine{shown}",
        "compare the fingerprint with the published fingerprint of the cluster, then run `ssh "
        "{host}` once in a terminal and answer yes",
        refused=True,
    ),
    Rule(
        r"Too many authentication failures",
        "{host} refused the login: ssh offered too many keys",
        "set the right key for this host in ~/.ssh/config: IdentityFile and IdentitiesOnly yes",
        refused=True,
    ),
    Rule(
        r"Your (?:account|password) has expired|password change required|account is .*not available",
        "{host} refused the login: the account or its password is no longer valid",
        "log in once with `ssh {host}` and follow its instructions",
        refused=True,
    ),
    Rule(
        r"Permission denied|No supported authentication methods|Authentication failed",
        "{host} refused the login{methods}",
        "{login}",
        refused=True,
    ),
    Rule(
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad|unsupported option",
        "the SSH configuration cannot be used",
        "fix the file and line in the evidence",
        refused=True,
    ),
    Rule(
        r"no matching (?:key exchange method|host key type|cipher|MAC) found|Unable to negotiate",
        "this machine's ssh and {host} have no cryptographic algorithm in common",
        "install a newer ssh on one of both, or allow the algorithm in the evidence in ~/.ssh/config",
        refused=True,
    ),
    Rule(
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "the name of {host} cannot be resolved",
        "check login.host in the profile, HostName in ~/.ssh/config, and the network (VPN?)",
    ),
    Rule(
        r"open failed: (?:connect failed|administratively prohibited)|stdio forwarding failed",
        "the jump host cannot reach {host}",
        "check HostName and Port in ~/.ssh/config; they must be valid on the jump host",
    ),
    Rule(
        r"Connection refused",
        "{host} refused the connection",
        "check the host name and the port; the host may be in maintenance",
    ),
    Rule(
        r"timed? ?out|Operation timed out|not responding",
        "{host} did not answer",
        "check the network (VPN?), the host name and the port; the host may be in maintenance",
    ),
    Rule(
        r"No route to host|Network is unreachable|Host is down",
        "there is no network route to {host}",
        "check the network (VPN?)",
    ),
    Rule(
        r"kex_exchange_identification|Connection (?:closed|reset) by|banner exchange|Broken pipe|by remote",
        "{host} closed the connection before the login",
        "the host may be busy, in maintenance, or block this address after failed logins; try again later",
    ),
)

_KEYS_HINT = "check that `ssh {host}` works in a terminal on this machine (keys in ~/.ssh, ssh-add -l)"
_TERMINAL_HINT = (
    "log in from a terminal: run `dtslurm doctor` or `ssh {host}` once and answer its questions; "
    "other commands use this login for some time"
)

_MASTER_GONE = re.compile(
    r"Control socket connect\(.*\): |mux_client_hello_exchange|mux_client_request_session: write packet"
)
_SESSION_REFUSED = re.compile(r"session request failed|Session open refused by peer|no more sessions")


def explain(
    host: str, stderr: str, *, code: int, fingerprint: str = "", was_prompted: bool = False
) -> TransportError:
    """Return the error of a failed login.

    Args:
        host: the host as the user names it.
        stderr: ssh's stderr, with or without ``-v``.
        code: ssh's exit code.
        fingerprint: the fingerprint of the host's key, if the caller knows it.
        was_prompted: whether the user could answer ssh's prompts.
    """
    shown_keys = _SHOWN_KEY.findall(stderr)
    jump_host = _UNREACHED.search(stderr) if _PROXY_MARK in stderr else None
    stderr = "\n".join(line for line in stderr.splitlines() if not CHATTER.match(line))
    evidence = [line for line in stderr.splitlines() if not _NOT_EVIDENCE.match(line)][-_MAX_EVIDENCE:]
    for rule in _RULES:
        if not re.search(rule.pattern, stderr, re.IGNORECASE):
            continue
        fingerprint_match = _FINGERPRINT.search(stderr)
        key = (
            fingerprint
            or (fingerprint_match.group() if fingerprint_match else "")
            or (shown_keys[-1] if shown_keys else "")
        )
        substitutions = {
            "host": f"the jump host {jump_host[1]}" if jump_host else host,
            "shown": f" ({key})" if key else "",
            "methods": _describe_methods(stderr),
            "login": (_KEYS_HINT if was_prompted or _accepts_only_keys(stderr) else _TERMINAL_HINT).format(
                host=host
            ),
        }
        error_class = LoginRefused if rule.refused else HostUnavailable
        return error_class(
            rule.message.format(**substitutions), evidence=evidence, hint=rule.hint.format(**substitutions)
        )
    return HostUnavailable(
        f"cannot connect to {host} over SSH",
        evidence=evidence or [f"ssh ended with exit code {code} and printed nothing"],
    )


def master_is_gone(stderr: str) -> bool:
    """Whether ssh's message means that it could not reach its master, so that nothing was sent."""
    return _MASTER_GONE.search(stderr) is not None


def session_was_refused(stderr: str) -> bool:
    """Whether ssh's message means that the server accepts no more sessions, so that nothing was run."""
    return _SESSION_REFUSED.search(stderr) is not None


def _parse_methods(stderr: str) -> list[str]:
    matches = re.findall(r"Permission denied \(([a-z0-9,@.\-]+)\)", stderr)
    return matches[-1].split(",") if matches else []


def _describe_methods(stderr: str) -> str:
    methods = _parse_methods(stderr)
    return f"; accepted methods: {', '.join(methods)}" if methods else ""


def _accepts_only_keys(stderr: str) -> bool:
    return bool(_parse_methods(stderr)) and not {"password", "keyboard-interactive"} & set(
        _parse_methods(stderr)
    )
