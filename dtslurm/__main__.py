"""Entry point of the ``dtslurm`` command, also for ``python -m dtslurm``."""

import gc

from dtslurm.interrupts import ExitAtInterrupt


def main() -> None:
    """Import the modules that every command needs, then run the command."""
    gc.set_threshold(100_000)  # imported objects stay alive: scanning them takes a tenth of the start time
    with ExitAtInterrupt():
        from dtslurm.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
