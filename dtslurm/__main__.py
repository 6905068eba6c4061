"""Starts the ``dtslurm`` command, also for ``python -m dtslurm``."""

import gc

from dtslurm.interrupts import ExitAtInterrupt


def main() -> None:
    """Import what every command needs, then run the one that is asked for."""
    with ExitAtInterrupt():
        gc.disable()  # what is imported is all kept: looking through it again and again takes a tenth of it
        from dtslurm.cli.main import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
