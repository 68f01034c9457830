"""A stand-in for vLLM's server: `prompt_logprobs` from a model in transformers, with vLLM's limits and refusals. That
its answers have vLLM's form is checked with answers of vLLM itself (tests/workers/goldens)."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Change = Callable[[dict[str, Any], int], Any]
"""(answer, number of the request) -> what is sent in its place: an object, (status, object), or None: hang up."""


class TeacherServer:
    """Serves the model in a folder as `teacher`, and requires the key. What `change` returns is sent instead of an
    answer. `paths` and `prompts` are those of the requests so far."""

    def __init__(
        self, folder: Path, *, key: str = "sesame", max_model_len: int = 256, max_logprobs: int = 20, port: int = 0
    ):
        self.change: Change = lambda answer, number: answer
        self.paths: list[str] = []
        self.prompts: list[list[int]] = []
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_model_len, self._max_logprobs = max_model_len, max_logprobs
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve({})

            def do_POST(self) -> None:
                self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _serve(self, body: dict[str, Any]) -> None:
                with outer._lock:
                    outer.paths.append(self.path)
                    if self.headers.get("Authorization") != f"Bearer {key}":
                        result: Any = 401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"}
                    else:
                        result = outer._answer(self.path, body)
                if result is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, content = result if isinstance(result, tuple) else (200, result)
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(sent)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The client has gone."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Refuse further connections."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "teacher", "max_model_len": self._max_model_len}]}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if body["model"] != "teacher":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        ids, count = body["prompt"], body["prompt_logprobs"]
        self.prompts.append(ids)
        if count > self._max_logprobs:
            text = f"Requested prompt logprobs of {count}, which is greater than max allowed: {self._max_logprobs}"
            return 400, {"error": {"message": text}}
        if max(ids) >= self._model.config.vocab_size:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if len(ids) + body["max_tokens"] > self._max_model_len:
            return 400, {"error": {"message": f"the context has {self._max_model_len} tokens"}}
        with torch.no_grad():
            logprobs = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found: list[Any] = [None]
        for row, token in zip(logprobs[:-1], ids[1:], strict=True):
            best = row.topk(count).indices.tolist()
            entry = {token: self._entry(row, token)} | {number: self._entry(row, number) for number in best}
            found.append({str(number): value for number, value in entry.items()})
        answer = {"object": "text_completion", "choices": [{"index": 0, "text": "x", "prompt_logprobs": found}]}
        return self.change(answer, len(self.prompts))

    def _entry(self, row: torch.Tensor, token: int) -> dict[str, Any]:
        value = float(row[token])
        rank = int((row > row[token]).sum()) + 1
        told = value if math.isfinite(value) else -9999.0
        return {"logprob": told, "rank": rank, "decoded_token": self._tokenizer.decode([token])}
