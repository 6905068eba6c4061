"""Prints what W&B and MLflow have kept of a run as JSON: python read_tracked.py RUN_DIR."""

import json
import struct
import sys
from pathlib import Path

import mlflow
from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 32768, 7  # of LevelDB's log format, which W&B's offline files have after a head of 7 bytes
WHOLE, LAST = 1, 4


def records(path):
    data, place, gathered = path.read_bytes(), HEAD, b""
    while place + HEAD <= len(data):
        room = BLOCK - place % BLOCK
        if room < HEAD:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + HEAD])
        gathered += data[place + HEAD : place + HEAD + size]
        place += HEAD + size
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(gathered)
            gathered = b""
            yield record


folder = Path(sys.argv[1])
[kept] = folder.glob("wandb/offline-run-*/*.wandb")
seen = {}
for record in records(kept):
    if record.HasField("run"):
        run = record.run
        seen.update(name=run.display_name, id=run.run_id, group=run.run_group, tags=list(run.tags))
        seen.update(notes=run.notes, project=run.project, commit=run.git.commit)
    for item in record.history.item:
        seen.setdefault("history", {})[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
client = mlflow.MlflowClient(f"file://{folder}/mlruns")
runs = [
    (item, run) for item in client.search_experiments() for run in client.search_runs([item.experiment_id])
]
[(experiment, run)] = runs
told = {"experiment": experiment.name, "name": run.info.run_name, "tags": run.data.tags}
print(json.dumps({"wandb": seen, "mlflow": {**told, "metrics": run.data.metrics}}))
