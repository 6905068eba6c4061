"""Tells Aim what the run is, as docs/trackers.md says, and logs a loss."""

import os

import aim

run = aim.Run(repo=os.environ["AIM_REPO"], experiment=os.environ["AIM_EXPERIMENT"])
run.name = os.environ["AIM_RUN_NAME"]
for tag in os.environ["AIM_RUN_TAGS"].split(","):
    run.add_tag(tag)
run.track(0.5, name="loss", step=1)
run.close()
