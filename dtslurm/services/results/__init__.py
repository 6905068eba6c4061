"""The files of a run: brought here, registered, exported."""
