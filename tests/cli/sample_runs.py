"""Records and files of finished runs, written without running a job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir
from dtslurm.worker.delivery.code_files import LIST, encode_list
from dtslurm.worker.delivery.objects import STAMP

ENDED = 1_750_000_000  # long enough ago that no scheduler is asked any more


def ended_job(job: str, state: JobState = JobState.COMPLETED, **values: Any) -> JobStatus:
    """Return the final status of a job or of an array task."""
    code = 0 if state is JobState.COMPLETED else 1
    known = {"exit_code": code, "start_time": ENDED - 90, "end_time": ENDED, "nodelist": "n1", **values}
    return JobStatus(
        **{"job_id": job, "state": state, "source": "sacct", "observed_at": ENDED + 5.0, **known}
    )


def rank_record(number: int, host: str, code: int = 0) -> str:
    """Return the text of a rank's exit record."""
    known = {"rank": number, "local_rank": 0, "node_rank": number, "host": host, "pid": 7, "signal": None}
    return json.dumps({**known, "started": ENDED - 80, "ended": ENDED, "exit_code": code})


class Runs:
    """Makes runs below a folder, and puts them into the user's index."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, name: str, job: str, *final: JobStatus, files: Mapping[str, object] | None = None, **values: Any
    ) -> JobRecord:
        """Make a run that ended as told, by default well; a file's lines may be given as objects."""
        path = self.root / f"{name}-{job}"
        record = JobRecord(
            **{
                "token": f"{int(job):012x}",
                "cluster": "local",
                "name": name,
                "run_dir": str(path),
                "job_id": job,
                "phase": "submitted",
                "created_at": ENDED - 100.0 + int(job),
                "final": final or (ended_job(job),),
                "script": "train.py",
                "launcher": "torchrun",
                **values,
            }
        )
        self.save(record)
        for place, content in (files or {}).items():
            self.write(path / place, content)
        return record

    def save(self, record: JobRecord) -> None:
        """Write a run's record, be there one or none."""
        context = Context()
        result = codec.encode({"schema": 1, **codec.plain(record)})
        if (Path(record.run_dir) / RunDir.RECORD).exists():
            (Path(record.run_dir) / RunDir.RECORD).write_bytes(result)
        else:
            RunDir(Path(record.run_dir)).create(context.transport, {RunDir.RECORD: result})
        context.index.put(record)

    def change(self, record: JobRecord, **values: Any) -> JobRecord:
        """Give a run's record other values."""
        changed = replace(record, **values)
        self.save(changed)
        return changed

    def deliver(self, record: JobRecord, files: Mapping[str, str]) -> None:
        """Put files into the code of a run as its snapshot does."""
        run = Path(record.run_dir)
        for name, content in files.items():
            self.write(run / "code" / name, content)
            os.utime(run / "code" / name, (STAMP, STAMP))
        tree = [(name, None, len(content)) for name, content in files.items()]
        (run / LIST).write_bytes(encode_list(tree))

    @staticmethod
    def write(path: Path, content: object) -> None:
        """Write a text, or a list of objects as lines of JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = content if isinstance(content, list) else []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) or str(content))
