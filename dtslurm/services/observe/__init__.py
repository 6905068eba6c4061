"""What screens and reports need, while a run goes on or after its end."""
