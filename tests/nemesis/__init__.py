"""Random schedules of faults against a real Slurm, and a checker over what was seen: ``make nemesis``.

`schedule` makes a schedule of a seed, `workload` lives it on a `site`, `faults` breaks things meanwhile, and
`checker` judges the `history` of everything that clients were told and training code did.
"""
