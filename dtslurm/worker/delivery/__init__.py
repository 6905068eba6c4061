"""Puts runs and their code in place, sends files back and frees what is not needed."""
