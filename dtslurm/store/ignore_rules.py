"""What a snapshot leaves out unasked: secrets, runs, and outside git what is made rather than written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from dtslurm.store.rundir import RunDir

# Names of files that hold credentials; as git's glob pathspecs too (`git_tree.diff`).
SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.p12", "*.pfx", "*.jks", "*.keytab", "*.kdbx", "*.key",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".git-credentials", ".pypirc",
    ".npmrc", ".pgpass", ".my.cnf", ".boto", ".s3cfg", ".htpasswd", ".vault-token", ".dockercfg", "*.ppk",
    "*.ovpn", "kaggle.json", ".hf_token", "hf_token", "application_default_credentials.json",
    "credentials.json", "client_secret*.json", "service-account*.json", "service_account*.json",
    "kubeconfig", "*.kubeconfig",
    "*.tfvars", "*.tfvars.json", "*.tfstate", "*.tfstate.backup", ".terraformrc", ".*_history", ".lesshst",
    ".viminfo", "rclone.conf", ".databrickscfg", ".comet.config", ".condarc", "secrets.toml", "secrets.yaml",
    "secrets.yml", "secrets.json",
)  # fmt: skip
_HARMLESS = re.compile(r"\.env\.(example|sample|template|dist|defaults?)|id_[a-z0-9]+\.pub")
SECRET_FOLDERS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".gcloud", ".config/gcloud", ".kaggle",
    ".huggingface", ".ngc", ".terraform.d", ".password-store",
)  # fmt: skip
# A private key under any name: as ssh-keygen and openssl write them.
PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")

# Outside git nobody says what is made: folders and files (by their ends) that are left out there.
MADE_FOLDERS = frozenset(
    {
        ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache",
        ".pytest_cache", ".ipynb_checkpoints", ".tox", ".nox", ".eggs", ".cache", ".hypothesis", "wandb",
        "mlruns", "lightning_logs",
    }
)  # fmt: skip
MADE_FILES = (
    ".ckpt", ".pt", ".pth", ".safetensors", ".pyc", ".pyo", ".o", ".sif", ".sqsh", ".tar", ".tar.gz", ".tgz",
    ".zip",
)  # fmt: skip


def _glob(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^/]*")


_SECRET_FOLDER = re.compile(rf"(?:^|/)(?:{'|'.join(map(_glob, SECRET_FOLDERS))})/", re.IGNORECASE)
_SECRET_NAME = re.compile("|".join(map(_glob, SECRETS)), re.IGNORECASE | re.DOTALL)


def is_secret(path: str) -> bool:
    """Return whether the name of a file says that it holds credentials."""
    folder, _, name = path.rpartition("/")
    secret = _in_secret_folder(folder) or _SECRET_NAME.fullmatch(name)
    return bool(secret) and not _HARMLESS.fullmatch(name)


@lru_cache(4096)
def _in_secret_folder(folder: str) -> bool:
    return bool(_SECRET_FOLDER.search(f"{folder}/"))


def is_made(path: str) -> bool:
    """Return whether a file (relative path) is of the kind left out outside git."""
    *folders, name = path.split("/")
    return name.lower().endswith(MADE_FILES) or not MADE_FOLDERS.isdisjoint(folders)


class RunFolders:
    """Finds run directories of ours in a tree, such as fetched ones: their logs and weights are no code."""

    def __init__(self, root: Path, inside: str) -> None:
        """Of the tree at ``root``; the folder ``inside`` and those above it are code, whatever they hold."""
        self._root = root
        self._known: dict[str, str] = {"": ""}
        while inside:
            self._known[inside] = ""
            inside = inside.rpartition("/")[0]

    def around(self, folder: str) -> str:
        """Return the outermost run directory that a folder is or lies in; empty if there is none."""
        unknown = []
        while folder not in self._known:
            unknown.append(folder)
            folder = folder.rpartition("/")[0]
        found = self._known[folder]
        for below in reversed(unknown):
            found = found or (below if self._is_run(below) else "")
            self._known[below] = found
        return found

    def is_secret(self, path: str) -> bool:
        """Return whether a file holds the values of ``--secret`` of a run."""
        folder, _, name = path.rpartition("/")
        return name == RunDir.SECRETS and self._is_run(folder)

    def _is_run(self, folder: str) -> bool:
        return all(Path(f"{self._root}/{folder}/{name}").is_file() for name in (RunDir.RECORD, RunDir.SCRIPT))


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a test for paths by patterns as in ``.gitignore``; a folder's path ends in a slash."""
    if not patterns:
        return lambda _: False
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(patterns).match_file


def named_outright(patterns: Iterable[str]) -> frozenset[str]:
    """Return the patterns that are plain paths: naming a secret so is meant."""
    return frozenset(pattern.lstrip("/") for pattern in patterns if not re.search(r"[*?\[!]", pattern))
