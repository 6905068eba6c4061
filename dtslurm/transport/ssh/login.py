"""Authentication for paramiko: with the agent's keys, key files, then the user's answers."""

from __future__ import annotations

import getpass
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
_ENCRYPTED = "it has a passphrase"
_METHODS = {"publickey", "keyboard-interactive", "password"}

Ask = Callable[[str, bool], str]


def ask_at_terminal(prompt: str, echo: bool) -> str:
    """Prompt the user at the terminal; echo the answer only if ``echo``."""
    if not echo:
        return getpass.getpass(prompt)
    with Path("/dev/tty").open("r+b", buffering=0) as terminal:
        terminal.write(prompt.encode())
        return terminal.readline().decode().rstrip("\r\n")


def authenticate(
    link: paramiko.Transport, target: Settings, env: Mapping[str, str], ask_user: Ask | None
) -> None:
    """Log in, with as many authentication factors as the server requires.

    Args:
        link: a started client whose host key was verified.
        target: the user, host and keys.
        env: the environment, with the location of the SSH agent.
        ask_user: prompts the user; None if there is no terminal.

    Raises:
        LoginRefused: the server accepts none of the available methods.
    """
    authentication = _Authentication(link, target, env, ask_user)
    try:
        allowed = link.auth_none(target.user)
    except BadAuthenticationType as error:
        allowed = error.allowed_types
    except AuthenticationException as error:
        raise authentication.refused([], str(error)) from None
    try:
        while not link.is_authenticated():
            allowed = authentication.factor(allowed)
    finally:
        authentication.close()


class _Authentication:
    """One login: the factors that the server has accepted, and notes on the keys that it has not."""

    def __init__(
        self, link: paramiko.Transport, target: Settings, env: Mapping[str, str], ask_user: Ask | None
    ) -> None:
        self.link = link
        self.target = target
        self.env = env
        self.ask = ask_user
        self.notes: list[str] = []
        self.question_count = 0
        self._accepted_methods: set[str] = set()  # a method accepted for one factor is not tried for the next
        self._agent: paramiko.Agent | None = None

    def close(self) -> None:
        """Close the connection to the agent."""
        if self._agent is not None:
            self._agent.close()

    def factor(self, allowed: Sequence[str]) -> list[str]:
        """Pass one factor; return the methods that the server accepts for the next, none after the last."""
        attempts_by_method = {
            "publickey": self._try_keys,
            "keyboard-interactive": self._try_interactive,
            "password": self._try_password,
        }
        for method, attempt in attempts_by_method.items():
            if method not in allowed or (method == "publickey" and method in self._accepted_methods):
                continue
            next_methods = attempt()
            if next_methods is not None:
                self._accepted_methods.add(method)
                return next_methods
        raise self.refused(allowed)

    def refused(self, allowed: Sequence[str], server_message: str = "") -> LoginRefused:
        """Return the error for a login that no available method completes."""
        ssh_message = f"{self.target.user}@{self.target.host}: Permission denied ({','.join(allowed)})."
        messages = "\n".join([*self.notes, server_message, ssh_message])
        error = ssh_errors.explain(self.target.host, messages, code=0, was_prompted=self.ask is not None)
        message, hint = error.message, error.hint
        if self.question_count >= TRIES:
            message = f"{self.target.host} did not accept the password or code, {self.question_count} times"
            hint = (
                "some clusters lock an account after several failed logins: wait for a new code, or "
                "check the password"
            )
        elif not _METHODS & set(allowed) and allowed:
            hint = "only OpenSSH supports these methods: use --transport openssh"
        return LoginRefused(message, evidence=error.evidence, hint=hint)

    def _try_keys(self) -> list[str] | None:
        for key, name in self._iterate_keys():
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

    def _iterate_keys(self) -> Iterator[tuple[paramiko.PKey, str]]:
        """Yield (key, origin): configured keys in the agent, then in files, then the agent's other keys."""
        configured_public_keys = {_read_public_key(path) for path in self.target.keys}
        agent_keys = [] if self.target.agent == "none" else self._list_agent_keys()
        configured_agent_keys = [key for key in agent_keys if key.get_base64() in configured_public_keys]
        for key in configured_agent_keys:
            yield key, "of the agent"
        for path in self.target.keys:
            if path.exists() and _read_public_key(path) not in {
                key.get_base64() for key in configured_agent_keys
            }:
                file_key = self._load_key(path)
                if file_key is not None:
                    yield file_key, str(path)
        if not self.target.only_keys:
            for key in agent_keys:
                if key not in configured_agent_keys:
                    yield key, "of the agent"

    def _list_agent_keys(self) -> list[paramiko.AgentKey]:
        socket_path = self.target.agent or self.env.get("SSH_AUTH_SOCK")
        if not socket_path or not Path(socket_path).exists():
            return []
        previous_socket = os.environ.get("SSH_AUTH_SOCK")
        os.environ["SSH_AUTH_SOCK"] = socket_path  # paramiko reads the socket's path from here only
        try:
            self._agent = self._agent or paramiko.Agent()
            return list(self._agent.get_keys())
        except SSHException as error:
            self.notes.append(f"the agent at {socket_path} does not answer: {error}")
            return []
        finally:
            if previous_socket is None:
                del os.environ["SSH_AUTH_SOCK"]
            else:
                os.environ["SSH_AUTH_SOCK"] = previous_socket

    def _load_key(self, path: Path) -> paramiko.PKey | None:
        """Return the private key in a file, after prompts for its passphrase; None if it cannot be read."""
        password: str | None = None
        for _ in range(TRIES + 1):
            key, problem = _read_key(path, password)
            if key is not None or not problem.startswith(_ENCRYPTED):
                break
            if self.ask is None:
                problem = f"{_ENCRYPTED}, and there is no terminal to enter it"
                break
            password = self.ask(f"Passphrase for key {path}: ", False)
        if key is None:
            self.notes.append(f"key not usable: {path}: {problem}")
        return key

    def _try_interactive(self) -> list[str] | None:
        if self.ask is None:
            return None
        for _ in range(TRIES):
            try:
                return list(self.link.auth_interactive(self.target.user, self._answer_questions))
            except BadAuthenticationType:
                return None
            except AuthenticationException:
                if not self.link.is_active():
                    break
        return None

    def _answer_questions(
        self, title: str, instructions: str, questions: list[tuple[str, bool]]
    ) -> list[str]:
        ask_user = self.ask
        if ask_user is None:
            return []
        target = f"({self.target.user}@{self.target.host}) "
        preamble = "".join(f"{text}\n" for text in (title, instructions) if text)
        answers = []
        for prompt, echo in questions:
            answers.append(ask_user(f"{preamble}{target}{prompt}", echo))
            preamble = ""
        self.question_count += bool(questions)
        return answers

    def _try_password(self) -> list[str] | None:
        if self.ask is None or self.question_count >= TRIES:
            return None
        for _ in range(TRIES):
            self.question_count += 1
            password = self.ask(f"{self.target.user}@{self.target.host}'s password: ", False)
            try:
                return list(self.link.auth_password(self.target.user, password, fallback=False))
            except BadAuthenticationType:
                return None
            except AuthenticationException:
                if not self.link.is_active():
                    break
        return None


def _read_public_key(path: Path) -> str:
    """Return the base64 public key from the ``.pub`` file beside a private key, ``""`` if there is none."""
    try:
        return Path(f"{path}.pub").read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _read_key(path: Path, password: str | None) -> tuple[paramiko.PKey | None, str]:
    """Return a private key and ``""``, or None and the reason why it cannot be read."""
    problem = "paramiko does not support this key type"
    for key_class in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return key_class.from_private_key_file(str(path), password), ""
        except PasswordRequiredException:
            return None, _ENCRYPTED
        except (SSHException, ValueError, TypeError) as error:
            if password is not None:
                problem = _ENCRYPTED
            elif "not a valid" not in str(error):
                problem = str(error)
        except OSError as error:
            return None, str(error)
    return None, problem
