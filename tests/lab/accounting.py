"""MariaDB and slurmdbd for a test cluster, without an installed database."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import conf
from tests.lab.software import SlurmUnavailable

if TYPE_CHECKING:
    from tests.lab.cluster import SlurmLab


def start(lab: SlurmLab) -> None:
    """Start the database and slurmdbd, and make the cluster, an account and the user known to it."""
    _start_database(lab)
    _prepare_database(lab)
    settings = lab.root / "etc/slurmdbd.conf"
    settings.touch(mode=0o600)  # slurmdbd refuses a file that others may read
    settings.write_text(conf.slurmdbd_conf(lab.layout), encoding="utf-8")
    lab.start_service("slurmdbd", [lab.program("slurmdbd"), "-D"])
    lab.wait_for("slurmdbd", lambda: lab.ok(["sacctmgr", "-n", "list", "cluster"]))
    # `add user` first would find no account; each call costs slurmdbd 0.3 to 0.6 s
    for words in (
        ["cluster", "lab"],
        ["account", "lab", "description=lab", "organization=lab"],
        ["user", lab.user, "account=lab", "defaultaccount=lab", "adminlevel=Admin"],
    ):
        lab.run(["sacctmgr", "-i", "-Q", "add", *words])


def _start_database(lab: SlurmLab) -> None:
    root = lab.root
    for folder in ("db", "dbtmp"):
        (root / folder).mkdir()
    argv = [
        lab.software.which("mariadbd"),
        "--no-defaults",
        f"--datadir={root}/db",
        f"--tmpdir={root}/dbtmp",
        f"--socket={root}/run/sql.sock",
        f"--pid-file={root}/run/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--port={lab.layout.sql_port}",
        "--skip-grant-tables",  # no accounts, so the system tables need not be installed, which takes seconds
        "--skip-name-resolve",
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=64M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-lock-wait-timeout=900",
        "--sync-binlog=0",
    ]
    if os.geteuid() == 0:
        argv.append("--user=root")
    prefix = lab.software.prefix
    if prefix is not None:
        argv += [
            f"--basedir={prefix}/usr",
            f"--lc-messages-dir={_share(prefix)}",
            f"--plugin-dir={prefix}/usr/lib/mysql/plugin",
        ]
    lab.start_service("mariadbd", argv)


def _share(prefix: Path) -> Path:
    for name in ("mysql", "mariadb"):
        folder = prefix / "usr/share" / name
        if (folder / "english").is_dir():
            return folder
    return prefix / "usr/share/mysql"


def _prepare_database(lab: SlurmLab) -> None:
    # slurmdbd makes a stored procedure, and without its table QOS inheritance is silently empty
    statements = [
        "create database if not exists slurm_acct;",
        "create database if not exists mysql;",
        "use mysql;",
        _procedure_table(lab.software.prefix),
    ]
    client = [lab.software.which("mariadb"), "--no-defaults", f"--socket={lab.root}/run/sql.sock"]
    text = "\n".join(statements)

    def done() -> bool:
        try:
            lab.run(client, input=text)
        except subprocess.CalledProcessError as error:
            if "connect" in error.stderr:
                return False
            raise
        return True

    lab.wait_for("mariadbd", done)


def _procedure_table(prefix: Path | None) -> str:
    for name in ("mysql", "mariadb"):
        file = (prefix or Path("/")) / f"usr/share/{name}/{name}_system_tables.sql"
        if file.is_file():
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("CREATE TABLE IF NOT EXISTS proc "):
                    return line
    raise SlurmUnavailable("MariaDB comes without its system tables")
