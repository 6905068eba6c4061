"""Parsers under any bytes: by hypothesis in every run of the suite, guided by coverage in ``make fuzz``."""
