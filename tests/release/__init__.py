"""A release as its users get it: built, installed in clean places, what it brings along listed."""
