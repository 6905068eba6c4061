"""The dashboard: a Textual application that shows immutable snapshots and never blocks on a network."""
