"""What programs share: files and their errors, an answer, the list of bad nodes."""
