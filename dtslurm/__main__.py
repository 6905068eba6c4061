"""Entry point of the ``dtslurm`` command, also for ``python -m dtslurm``."""

import gc

from dtslurm.interrupts import ExitAtInterrupt


def main() -> None:
    """Import the modules that every command needs, then run the command."""
    with ExitAtInterrupt():
        gc.disable()  # imported objects stay alive: scanning them takes a tenth of the import time
        from dtslurm.cli.main import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
