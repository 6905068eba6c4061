"""Diagnosis: finds the first rank that failed and the cause from given evidence. No file is read here."""
