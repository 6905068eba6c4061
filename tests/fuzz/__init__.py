"""Fuzz tests of the parsers: with hypothesis in the suite, guided by coverage in ``make fuzz``."""
