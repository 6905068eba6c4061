"""The runs that there are, their state and history, and changes to them."""
