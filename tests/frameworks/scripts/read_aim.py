"""Prints what Aim has kept of the only run in a repository as JSON: python read_aim.py REPO."""

import json
import sys

import aim

repository = aim.Repo.from_path(sys.argv[1])
[identity] = repository.list_all_runs()
run = aim.Run(identity, repo=repository, read_only=True)
print(json.dumps({"name": run.name, "experiment": run.experiment, "tags": sorted(run.tags)}))
