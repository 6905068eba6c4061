"""A small HTTP server that stands in for an inference server such as vLLM: GET /sample?prompt=3&seed=7.

A sample is a function of the request alone, so that a restarted server gives the same samples. Run as
``generator.py PORT``.
"""

import hashlib
import http.server
import os
import sys
import urllib.parse


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers /health, /metrics in Prometheus's format, and /sample."""

    requests = 0

    def do_GET(self) -> None:
        """Answer a request."""
        Handler.requests += 1
        path, _, query = self.path.partition("?")
        if path == "/metrics":
            text = f'vllm:num_requests_waiting{{engine="0"}} 0\nvllm:request_success_total {self.requests}\n'
        elif path == "/sample":
            request = urllib.parse.parse_qs(query)
            digest = hashlib.sha256(repr(sorted(request.items())).encode()).digest()
            text = str(int.from_bytes(digest[:4], "big") / 2**32)
        else:
            text = "ok"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_words: object) -> None:
        """Log nothing about single requests."""


if __name__ == "__main__":
    print("generator", os.environ.get("DTSLURM_ROLE_INSTANCE"), "on port", sys.argv[1], flush=True)
    http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
