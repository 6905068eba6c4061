"""The dashboard: a Textual application over frozen snapshots. Nothing in it waits for a network."""
