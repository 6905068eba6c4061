"""A server that takes what W&B's own client uploads, as far as `wandb sync` asks; it has no accounts."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Uploads(ThreadingHTTPServer):
    """What was uploaded.

    Attributes:
        runs: what each request to make or change a run said of it, by the run's id.
        history: the rows that were logged, by the run's id.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client goes as soon as it has sent its last."""

    def answered(self, query: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the data that answers a query."""
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": self._upserted(values), "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/files/{name}"} for name in values["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def _upserted(self, values: dict[str, Any]) -> dict[str, Any]:
        name, project = values["name"], {"id": "1", "name": values["project"]}
        self.runs.setdefault(name, {}).update({key: value for key, value in values.items() if value})
        return {"id": "1", "name": name, "project": {**project, "entity": {"id": "1", "name": "me"}}}

    def logged(self, run: str, files: dict[str, Any]) -> None:
        """Take a piece of the files that grow."""
        rows = files.get("wandb-history.jsonl", {}).get("content", [])
        self.history.setdefault(run, []).extend(json.loads(row) for row in rows)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Uploads

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, words = self._body(), self.path.split("/")
        if self.path == "/graphql":
            document = json.loads(body)
            self._answer({"data": self.server.answered(document["query"], document.get("variables") or {})})
            return
        if words[-1] == "file_stream":
            self.server.logged(words[-2], json.loads(body).get("files") or {})
        self._answer({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def uploads() -> Iterator[Uploads]:
    """Serve while the block runs."""
    server = Uploads()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
