"""Serves a policy: ``policy_server.py PORT FOLDER``. It stands for vLLM, which needs a GPU.

``POST /weights?version=N`` replaces the weights by those in the body. ``POST /generate`` returns completions
of a prompt with their log probabilities, and the version of the weights that made them.
"""

import http.server
import io
import json
import sys
import threading
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from transformers import LlamaForCausalLM

torch.set_num_threads(1)
MODEL = LlamaForCausalLM.from_pretrained(sys.argv[2])
LOCK = threading.Lock()
VERSION = 0  # of the weights; those at the start have none


@torch.no_grad()
def generate(prompt: list[int], count: int, length: int) -> dict[str, Any]:
    """Return ``count`` completions of ``length`` tokens, and the log probability of each token."""
    tokens = torch.tensor([prompt] * count)
    log_probs = []
    for _ in range(length):
        distribution = torch.log_softmax(MODEL(input_ids=tokens).logits[:, -1].float(), -1)
        chosen = torch.multinomial(distribution.exp(), 1)
        log_probs.append(distribution.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    completions = tokens[:, len(prompt) :].tolist()
    return {"completions": completions, "log_probs": torch.cat(log_probs, 1).tolist(), "version": VERSION}


class Policy(http.server.BaseHTTPRequestHandler):
    """Answers the trainer, and the health check of the role."""

    def do_GET(self) -> None:
        """Tell that the model is loaded."""
        self._answer({"version": VERSION})

    def do_POST(self) -> None:
        """Replace the weights, or generate."""
        global VERSION  # noqa: PLW0603 (a server has one model)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = urlparse(self.path)
        with LOCK:
            if url.path == "/weights":
                MODEL.load_state_dict(torch.load(io.BytesIO(body), weights_only=True), strict=False)
                VERSION = int(parse_qs(url.query)["version"][0])
                print("weights of version", VERSION, flush=True)
                answer = {"version": VERSION}
            else:
                answer = generate(**json.loads(body))
        self._answer(answer)

    def _answer(self, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Write nothing."""


http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Policy).serve_forever()
