"""Proving who we are to a server, for paramiko: agent, keys, then what a person answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import paramiko
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    PasswordRequiredException,
    SSHException,
)

from dtslurm.errors import LoginRefused
from dtslurm.transport.ssh import ssh_errors
from dtslurm.transport.ssh.ssh_config import Settings

TRIES = 3
_LOCKED = "it has a passphrase"
_METHODS = {"publickey", "keyboard-interactive", "password"}

Ask = Callable[[str, bool], str]


def ask_at_terminal(question: str, seen: bool) -> str:
    """Ask a person at the terminal; the answer is shown while typed only if ``seen``."""
    import getpass

    if not seen:
        return getpass.getpass(question)
    with Path("/dev/tty").open("r+b", buffering=0) as terminal:
        terminal.write(question.encode())
        return terminal.readline().decode().rstrip("\r\n")


def authenticate(link: paramiko.Transport, target: Settings, env: Mapping[str, str], ask: Ask | None) -> None:
    """Log in, with as many factors as the server wants.

    Args:
        link: a started client whose host key was checked.
        target: who, where and with which keys.
        env: says where the agent is.
        ask: asks a person; None if nobody can be asked.

    Raises:
        LoginRefused: the server takes nothing that we have.
    """
    attempt = _Attempt(link, target, env, ask)
    try:
        allowed = link.auth_none(target.user)
    except BadAuthenticationType as error:
        allowed = error.allowed_types
    except AuthenticationException as error:
        raise attempt.refused([], str(error)) from None
    try:
        while not link.is_authenticated():
            allowed = attempt.factor(allowed)
    finally:
        attempt.close()


class _Attempt:
    def __init__(
        self, link: paramiko.Transport, target: Settings, env: Mapping[str, str], ask: Ask | None
    ) -> None:
        self.link = link
        self.target = target
        self.env = env
        self.ask = ask
        self.notes: list[str] = []
        self.asked = 0
        self._spent: set[str] = set()  # a method that was accepted once is not tried for the next factor
        self._agent: paramiko.Agent | None = None

    def close(self) -> None:
        """Leave the agent."""
        if self._agent is not None:
            self._agent.close()

    def factor(self, allowed: Sequence[str]) -> list[str]:
        """Pass one factor; return the methods that the server takes for the next, none when it is enough."""
        tries = {"publickey": self._keys, "keyboard-interactive": self._answers, "password": self._password}
        for method, attempt in tries.items():
            if method not in allowed or (method == "publickey" and method in self._spent):
                continue
            further = attempt()
            if further is not None:
                self._spent.add(method)
                return further
        raise self.refused(allowed)

    def refused(self, allowed: Sequence[str], said: str = "") -> LoginRefused:
        """Return the error for a login that nothing of ours opens."""
        words = f"{self.target.user}@{self.target.host}: Permission denied ({','.join(allowed)})."
        lines = "\n".join([*self.notes, said, words])
        error = ssh_errors.explain(self.target.host, lines, code=0, asked=self.ask is not None)
        message, hint = error.message, error.hint
        if self.asked >= TRIES:
            message = f"{self.target.host} did not accept the password or code, {self.asked} times"
            hint = (
                "some sites lock an account after a few of these: wait for a new code, or check the password"
            )
        elif not _METHODS & set(allowed) and allowed:
            hint = "these ways are OpenSSH's alone: use --transport openssh"
        return LoginRefused(message, evidence=error.evidence, hint=hint)

    def _keys(self) -> list[str] | None:
        for key, name in self._offered():
            try:
                return list(self.link.auth_publickey(self.target.user, key))
            except AuthenticationException:
                self.notes.append(f"key not accepted: {name}")
            except SSHException as error:
                if not self.link.is_active():
                    self.notes.append(f"Too many authentication failures: {error}")
                    raise self.refused(["publickey"]) from None
                self.notes.append(f"key not usable: {name}: {error}")
        return None

    def _offered(self) -> Iterator[tuple[paramiko.PKey, str]]:
        listed = {_public(path) for path in self.target.keys}
        of_agent = [] if self.target.agent == "none" else self._of_agent()
        named = [key for key in of_agent if key.get_base64() in listed]
        for key in named:
            yield key, "of the agent"
        for path in self.target.keys:
            if path.exists() and _public(path) not in {key.get_base64() for key in named}:
                loaded = self._load(path)
                if loaded is not None:
                    yield loaded, str(path)
        if not self.target.only_keys:
            for key in of_agent:
                if key not in named:
                    yield key, "of the agent"

    def _of_agent(self) -> list[paramiko.AgentKey]:
        place = self.target.agent or self.env.get("SSH_AUTH_SOCK")
        if not place or not Path(place).exists():
            return []
        before = os.environ.get("SSH_AUTH_SOCK")
        os.environ["SSH_AUTH_SOCK"] = place  # the only way to tell paramiko
        try:
            self._agent = self._agent or paramiko.Agent()
            return list(self._agent.get_keys())
        except SSHException as error:
            self.notes.append(f"the agent at {place} does not answer: {error}")
            return []
        finally:
            if before is None:
                del os.environ["SSH_AUTH_SOCK"]
            else:
                os.environ["SSH_AUTH_SOCK"] = before

    def _load(self, path: Path) -> paramiko.PKey | None:
        password: str | None = None
        for _ in range(TRIES + 1):
            key, fault = _read_key(path, password)
            if key is not None or not fault.startswith(_LOCKED):
                break
            if self.ask is None:
                fault = f"{_LOCKED}, and nobody can be asked for it"
                break
            password = self.ask(f"Passphrase for key {path}: ", False)
        if key is None:
            self.notes.append(f"key not usable: {path}: {fault}")
        return key

    def _answers(self) -> list[str] | None:
        if self.ask is None:
            return None
        for _ in range(TRIES):
            try:
                return list(self.link.auth_interactive(self.target.user, self._answer))
            except BadAuthenticationType:
                return None
            except AuthenticationException:
                if not self.link.is_active():
                    break
        return None

    def _answer(self, title: str, told: str, questions: list[tuple[str, bool]]) -> list[str]:
        ask = self.ask
        if ask is None:
            return []
        who = f"({self.target.user}@{self.target.host}) "
        before = "".join(f"{text}\n" for text in (title, told) if text)
        answers = []
        for question, seen in questions:
            answers.append(ask(f"{before}{who}{question}", seen))
            before = ""
        self.asked += bool(questions)
        return answers

    def _password(self) -> list[str] | None:
        if self.ask is None or self.asked >= TRIES:
            return None
        for _ in range(TRIES):
            self.asked += 1
            password = self.ask(f"{self.target.user}@{self.target.host}'s password: ", False)
            try:
                return list(self.link.auth_password(self.target.user, password, fallback=False))
            except BadAuthenticationType:
                return None
            except AuthenticationException:
                if not self.link.is_active():
                    break
        return None


def _public(path: Path) -> str:
    """Return the base64 of a key's public half, as far as it lies beside it."""
    try:
        return Path(f"{path}.pub").read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _read_key(path: Path, password: str | None) -> tuple[paramiko.PKey | None, str]:
    """Return a private key, or None and why not."""
    fault = "not a key that paramiko knows"
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path), password), ""
        except PasswordRequiredException:
            return None, _LOCKED
        except (SSHException, ValueError, TypeError) as error:
            if password is not None:
                fault = _LOCKED
            elif "not a valid" not in str(error):
                fault = str(error)
        except OSError as error:
            return None, str(error)
    return None, fault
