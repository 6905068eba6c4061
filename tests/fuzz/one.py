"""Runs one fuzz target under atheris; the arguments after its name belong to libFuzzer."""

from __future__ import annotations

import sys

import atheris


def main() -> None:
    """Run until libFuzzer ends it."""
    with atheris.instrument_imports(include=["dtslurm"]):
        from tests.fuzz.targets import TARGETS
    run = TARGETS[sys.argv[1]].run
    atheris.Setup([sys.argv[0], *sys.argv[2:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
