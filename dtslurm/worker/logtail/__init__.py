"""Follow the log files of a run and send new output as frames."""
