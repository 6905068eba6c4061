"""Files that a snapshot excludes by default: secrets, runs, and, outside git, generated files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from dtslurm.store.rundir import RunDir

# Names of files that hold credentials, also used as glob pathspecs of git (`git_tree`).
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
_NOT_SECRET = re.compile(r"\.env\.(example|sample|template|dist|defaults?)|id_[a-z0-9]+\.pub")
SECRET_FOLDERS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".gcloud", ".config/gcloud", ".kaggle",
    ".huggingface", ".ngc", ".terraform.d", ".password-store",
)  # fmt: skip
# The first line of a private key, as ssh-keygen and openssl write it.
PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")

# Outside git there are no ignore rules, so these folders and file suffixes are excluded as generated.
GENERATED_FOLDERS = frozenset(
    {
        ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache",
        ".pytest_cache", ".ipynb_checkpoints", ".tox", ".nox", ".eggs", ".cache", ".hypothesis", "wandb",
        "mlruns", "lightning_logs",
    }
)  # fmt: skip
GENERATED_FILES = (
    ".ckpt", ".pt", ".pth", ".safetensors", ".pyc", ".pyo", ".o", ".sif", ".sqsh", ".tar", ".tar.gz", ".tgz",
    ".zip",
)  # fmt: skip


def _glob_to_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^/]*")


_SECRET_FOLDER = re.compile(rf"(?:^|/)(?:{'|'.join(map(_glob_to_regex, SECRET_FOLDERS))})/", re.IGNORECASE)
_SECRET_NAME = re.compile("|".join(map(_glob_to_regex, SECRETS)), re.IGNORECASE | re.DOTALL)


def is_secret(path: str) -> bool:
    """Return whether a file's name indicates that it holds credentials."""
    folder, _, name = path.rpartition("/")
    secret = _in_secret_folder(folder) or _SECRET_NAME.fullmatch(name)
    return bool(secret) and not _NOT_SECRET.fullmatch(name)


@lru_cache(4096)
def _in_secret_folder(folder: str) -> bool:
    return bool(_SECRET_FOLDER.search(f"{folder}/"))


def is_made(path: str) -> bool:
    """Return whether a file (relative path) counts as generated, which excludes it outside git."""
    *folders, name = path.split("/")
    return name.lower().endswith(GENERATED_FILES) or not GENERATED_FOLDERS.isdisjoint(folders)


class RunFolders:
    """The run directories in a source tree, such as downloaded runs, whose logs and weights are not code."""

    def __init__(self, root: Path, project_folder: str) -> None:
        """Search the tree at ``root``; ``project_folder`` and its parents never count as run directories."""
        self._root = root
        self._runs_by_folder: dict[str, str] = {"": ""}
        while project_folder:
            self._runs_by_folder[project_folder] = ""
            project_folder = project_folder.rpartition("/")[0]

    def around(self, folder: str) -> str:
        """Return the outermost run directory that contains or is a folder; empty if there is none."""
        unknown_folders = []
        while folder not in self._runs_by_folder:
            unknown_folders.append(folder)
            folder = folder.rpartition("/")[0]
        run = self._runs_by_folder[folder]
        for subfolder in reversed(unknown_folders):
            run = run or (subfolder if self._is_run(subfolder) else "")
            self._runs_by_folder[subfolder] = run
        return run

    def is_secret(self, path: str) -> bool:
        """Return whether a file holds the values of a run's ``--secret`` or ``--notify``."""
        folder, _, name = path.rpartition("/")
        return name in {RunDir.SECRETS, RunDir.NOTIFY} and self._is_run(folder)

    def _is_run(self, folder: str) -> bool:
        return all(Path(f"{self._root}/{folder}/{name}").is_file() for name in (RunDir.RECORD, RunDir.SCRIPT))


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate for paths by ``.gitignore`` patterns; the path of a folder ends in a slash."""
    if not patterns:
        return lambda _: False
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(patterns).match_file


def literal_patterns(patterns: Iterable[str]) -> frozenset[str]:
    """Return the patterns without wildcards: such a pattern includes a secret explicitly."""
    return frozenset(pattern.lstrip("/") for pattern in patterns if not re.search(r"[*?\[!]", pattern))
