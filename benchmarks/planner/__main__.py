"""``python -m benchmarks.planner [--json]``: see :mod:`benchmarks.planner.score`."""

from benchmarks.planner.score import main

main()
