"""Answers of vLLM's own server about a prompt, for tests/workers/test_teacher_endpoint.py. To write them again:

.venv/bin/python -m tests.workers.goldens.vllm_answers
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from tests.conftest import ROOT

GOLDEN = Path(__file__).with_name("vllm_answers.json")
KEY, LIMIT, WAIT_S = "sesame", 256, 300.0
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / 'tests' / 'vllm_cpu'}:{ROOT}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
OPTIONS = "--served-model-name teacher --host 127.0.0.1 --enforce-eager --dtype float32 --max-num-seqs 16"


def write_model(folder: Path) -> None:
    """A tiny model whose weights are equal on every machine."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}
    make_tiny_model(TinyModel(architecture="qwen2", **sizes), folder)
    rng, path = np.random.default_rng(7), folder / "model.safetensors"
    weights = {}
    for name, tensor in sorted(load_file(path).items()):
        drawn = rng.standard_normal(tensor.shape) * 0.2
        weights[name] = (np.ones(tensor.shape) if "norm" in name else drawn).astype(np.float32)
    save_file(weights, path, {"format": "pt"})


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of the server."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as response:
        return json.load(response)


def main() -> None:
    import vllm

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary) / "teacher")
        words = f"--model {temporary}/teacher --port {port} --max-model-len {LIMIT} --api-key {KEY} {OPTIONS}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=temporary)
        try:
            url, end = f"http://127.0.0.1:{port}/v1", time.monotonic() + WAIT_S
            while True:
                try:
                    models = ask(f"{url}/models")
                    break
                except (urllib.error.URLError, OSError):
                    if time.monotonic() > end or server.poll() is not None:
                        raise
                    time.sleep(1)
            prompt = [5, 70, 80, 90, 200, 0, 1, 2, 310, 319, 12, 33]
            asked = {"model": "teacher", "prompt": prompt, "max_tokens": 1}
            answers = {str(k): ask(f"{url}/completions", asked | {"prompt_logprobs": k}) for k in (0, 3)}
        finally:
            server.terminate()
            server.wait()
    told = {"vllm": vllm.__version__, "key": KEY, "max_model_len": models["data"][0]["max_model_len"]}
    GOLDEN.write_text(json.dumps(told | {"prompt": prompt, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
