"""What commands print: tables, verdicts, progress, JSON."""
