"""The long options of sbatch(1) in Slurm 20.11 to 26.05, grouped by whether they take a value."""

from __future__ import annotations

_WITHOUT = """
    consolidate-segments contiguous hold ignore-pbs overcommit oversubscribe parsable quiet reboot share
    spread-job stepmgr test-only usage use-min-nodes verbose wait
"""
_OPTIONAL = "exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports"
_WITH = """
    acctg-freq batch bb bbf begin burst-buffer cluster-constraint clusters comment container-id core-spec
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot distribution export export-file extra
    extra-node-info gid gpu-bind gpu-freq gpus gpus-per-socket gpus-per-task gres gres-flags hint input
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus
    network nodefile ntasks ntasks-per-core ntasks-per-gpu ntasks-per-socket open-mode power prefer
    priority profile segment sockets-per-node switches tasks-per-node thread-spec threads-per-core
    time-min tmp tres-bind tres-per-job tres-per-node tres-per-socket tres-per-task uid wait-all-nodes
    wckey wrap
"""
WITHOUT_VALUE = frozenset(_WITHOUT.split())
WITH_OPTIONAL_VALUE = frozenset(_OPTIONAL.split())  # --exclusive=user, never --exclusive user
WITH_VALUE = frozenset(_WITH.split())
