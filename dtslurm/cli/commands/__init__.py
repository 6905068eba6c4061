"""One file per command: read its options, call one use case, print what it returns."""
