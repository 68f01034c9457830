"""A stand-in for servers: log-probs of prompts from a model in transformers. `prompt_logprobs` have vLLM's limits and
refusals, and answers of vLLM itself (tests/workers/goldens) show that they have its form. Answers of SGLang's /generate
and of OpenAI's echo are made by their documentation."""

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
        if path == "/generate":
            self.prompts.append(body["input_ids"])
            return self.change(self._generated(body), len(self.prompts))
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if body["model"] != "teacher":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.prompts.append(body["prompt"])
        if body.get("echo"):
            return self.change(self._echo(body), len(self.prompts))
        ids, count = body["prompt"], body["prompt_logprobs"]
        if count > self._max_logprobs:
            text = f"Requested prompt logprobs of {count}, which is greater than max allowed: {self._max_logprobs}"
            return 400, {"error": {"message": text}}
        if max(ids) >= self._model.config.vocab_size:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if len(ids) + body["max_tokens"] > self._max_model_len:
            return 400, {"error": {"message": f"the context has {self._max_model_len} tokens"}}
        found: list[Any] = [None]
        for row, token in zip(self._logprobs(ids)[:-1], ids[1:], strict=True):
            best = row.topk(count).indices.tolist()
            entry = {token: self._entry(row, token)} | {number: self._entry(row, number) for number in best}
            found.append({str(number): value for number, value in entry.items()})
        answer = {"object": "text_completion", "choices": [{"index": 0, "text": "x", "prompt_logprobs": found}]}
        return self.change(answer, len(self.prompts))

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return found

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang: triples of log-prob, id and text, from place logprob_start_len on; new tokens apart."""
        ids, k, text = body["input_ids"], body["top_logprobs_num"], self._tokenizer.decode
        assert body["return_logprob"] and body["return_text_in_logprobs"] and body["logprob_start_len"] == 0
        own: list[Any] = [[None, ids[0], text([ids[0]])]]
        tops: list[Any] = [None]
        rows = self._logprobs(ids)
        for row, token in zip(rows[:-1], ids[1:], strict=True):
            own.append([float(row[token]), token, text([token])])
            tops.append([[float(row[n]), n, text([n])] for n in row.topk(k).indices.tolist()])
        new = int(rows[-1].argmax())
        meta = {"prompt_tokens": len(ids), "completion_tokens": 1, "input_token_logprobs": own}
        meta |= {"output_token_logprobs": [[float(rows[-1, new]), new, text([new])]]}
        return {"text": "x", "meta_info": meta | ({"input_top_logprobs": tops} if k else {})}

    def _echo(self, body: dict[str, Any]) -> dict[str, Any]:
        """OpenAI: the tokens of the prompt and the new one, by their texts."""
        ids, rows = body["prompt"], self._logprobs(body["prompt"])
        whole = [*ids, int(rows[-1].argmax())]
        own = [None, *(float(row[token]) for row, token in zip(rows, whole[1:], strict=True))]
        texts = [self._tokenizer.decode([token]) for token in whole]
        choice = {"text": "".join(texts), "logprobs": {"tokens": texts, "token_logprobs": own, "top_logprobs": None}}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _entry(self, row: torch.Tensor, token: int) -> dict[str, Any]:
        value = float(row[token])
        rank = int((row > row[token]).sum()) + 1
        told = value if math.isfinite(value) else -9999.0
        return {"logprob": told, "rank": rank, "decoded_token": self._tokenizer.decode([token])}
