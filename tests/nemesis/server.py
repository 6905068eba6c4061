"""A server of a schedule: ``server.py PORT HISTORY RUN``. It writes signs of life into the history."""

import http.server
import os
import sys
import threading
import time

from body import append_event  # type: ignore[import-not-found]

ALIVE_S = 0.3


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers every request with 200."""

    def do_GET(self) -> None:
        """Send an empty answer."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Write nothing."""


def main() -> None:
    os.environ.pop("CLOCK_SKEW", None)  # by one clock only the history can be judged
    port, history, run = sys.argv[1:]
    start = {name: int(os.environ[f"DTSLURM_ROLE_{name.upper()}"]) for name in ("instance", "start")}
    server = http.server.ThreadingHTTPServer(("", int(port)), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    append_event(history, "serve", run, -1, pid=os.getpid(), **start)
    while True:
        time.sleep(ALIVE_S)
        append_event(history, "alive", run, -1, **start)


if __name__ == "__main__":
    main()
