"""A stand-in for SGLang, which needs CUDA: hpcrl's native engine behind the calls that hpcrl makes to SGLang.

Every call is checked against the signatures of the real package (signatures.txt, written by record.py). Refused is what
the real engine refuses: an update of weights outside its session, emptying the prefix cache while requests run, a seed
without deterministic inference, log-probs of truncated sampling without top_k, a sequence as long as the context.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcrl.engines.gen.base import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.sampling import GOLDEN, MASK64, stream_origin
from hpcrl.rollout.types import FinishReason
from sglang.signatures import check_call, check_fields

WRONG = os.environ.get("SGLANG_STANDIN_WRONG", "")
"""What goes wrong in the third burst: die, hang, token, nan or short."""


@dataclass
class FlushCacheReqOutput:
    success: bool
    message: str = ""


class Engine:
    """calls: the names of the calls so far."""

    def __init__(self, **kwargs: Any):
        check_fields("ServerArgs", kwargs)
        self.calls: list[str] = []
        self._folder, self._arguments = Path(kwargs["model_path"]), kwargs
        self._session: dict[str, torch.Tensor] | None = None
        self._asleep: set[str] = set()
        context = kwargs["context_length"]
        self._native = NativeEngine(
            self._folder,
            max_slots=kwargs["max_running_requests"],
            max_length=context,
            dtype=getattr(torch, kwargs["dtype"]),
            load=kwargs["load_format"] == "auto",
        )
        self._weights: dict[str, torch.Tensor] = {}
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = TokenizerManager(self._native, self._folder, self.calls, kwargs)

    def begin_weight_update(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        self._called("begin_weight_update", args, kwargs)
        if self._session is not None:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._session = {}
        return True, "Success"

    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        given = self._called("update_weights_from_tensor", args, kwargs)
        if self._session is None:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        self._session |= {name: tensor.clone() for name, tensor in given["named_tensors"]}
        return (True, "Success") if not given.get("flush_cache", True) else self._flushed()

    def end_weight_update(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        self._called("end_weight_update", args, kwargs)
        if self._session is None:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._weights |= self._session
        self._session = None
        if "weights" not in self._asleep and self._weights:
            try:
                self._native.load_weights(list(self._weights.items()), 0)
            except ValueError as error:  # SGLang would go on with what it has of them
                print(f"incomplete weights: {error}", file=sys.stderr, flush=True)
        return True, "Success"

    def flush_cache(self, *args: Any, **kwargs: Any) -> FlushCacheReqOutput:
        self._called("flush_cache", args, kwargs)
        answer = FlushCacheReqOutput(*self._flushed())
        check_fields("FlushCacheReqOutput", vars(answer))
        return answer

    def release_memory_occupation(self, *args: Any, **kwargs: Any) -> None:
        self._called("release_memory_occupation", args, kwargs)
        assert not self._native.progress(), "release_memory_occupation should be called only when server is idle."
        assert self._arguments["enable_memory_saver"]
        tags = set(args[0])
        assert tags <= {"weights", "kv_cache", "cuda_graph"} - self._asleep, "what is asleep cannot sleep again"
        self._asleep |= tags
        if "weights" in tags:
            self._weights.clear()
        self._native.sleep()

    def resume_memory_occupation(self, *args: Any, **kwargs: Any) -> None:
        self._called("resume_memory_occupation", args, kwargs)
        tags = set(args[0])
        assert tags <= self._asleep, "what is awake cannot wake"
        self._asleep -= tags

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._called("shutdown", args, kwargs)
        self._native.close()
        self.loop.close()

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(name)
        return check_call(f"Engine.{name}", args, kwargs)

    def _flushed(self) -> tuple[bool, str]:
        if self._native.progress():
            return False, "Cache not flushed because there are pending requests."
        return True, ""


class TokenizerManager:
    """Takes requests and steps the native engine, one token of every request at a time."""

    def __init__(self, native: NativeEngine, folder: Path, calls: list[str], arguments: dict[str, Any]):
        self._native, self._calls, self._arguments = native, calls, arguments
        eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
        self._eos = {eos} if isinstance(eos, int) else set(eos or ())
        self._done: dict[int, Any] = {}
        self._num_asked = 0
        self.salts: list[str] = []

    async def generate_request(self, *args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
        obj = check_call("TokenizerManager.generate_request", args, kwargs)["obj"]
        self._calls.append("generate_request")
        self.salts.append(obj.cache_salt)
        params = dict(obj.sampling_params)
        check_fields("SamplingParams", params)
        self._refuse_what_sglang_refuses(obj, params)
        ids, left = list(obj.input_ids), params["max_new_tokens"]
        left = max(0, min(left, self._arguments["context_length"] - 2 - len(ids)))
        made: list[tuple[int, float, float]] = []
        reason: dict[str, Any] = {"type": "length", "length": left}
        while len(made) < left:
            token, logprob, behaviour = await self._next(ids, params)
            ids.append(token)
            made.append((token, logprob, behaviour))
            ends = self._eos | set(params.get("stop_token_ids") or ())
            if not params.get("ignore_eos") and token in ends:
                reason = {"type": "stop", "matched": token}
                break
        self._go_wrong(made)
        meta: dict[str, Any] = {"finish_reason": reason, "completion_tokens": len(made)}
        if obj.return_logprob:
            meta["output_token_logprobs"] = [(logprob, token, None) for token, logprob, _ in made]
        if obj.return_sampling_mask:
            meta["output_token_sampling_logprobs"] = [behaviour for _, _, behaviour in made]
        yield {"output_ids": [token for token, *_ in made], "meta_info": meta}

    def _refuse_what_sglang_refuses(self, obj: Any, params: dict[str, Any]) -> None:
        seeded, top_k = params.get("sampling_seed") is not None, params.get("top_k", -1)
        if seeded and not self._arguments.get("enable_deterministic_inference"):
            raise AssertionError("the seed would be ignored")
        if seeded and not -(2**63) <= params["sampling_seed"] < 2**63:
            raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {params['sampling_seed']}.")
        if params.get("min_p"):
            raise AssertionError("With sampling seed, multinomial_with_seed will provide wrong results")
        most = self._arguments.get("sampling_mask_max_tokens", 4096)
        if obj.return_sampling_mask and top_k != 1 and not 1 < top_k <= most:
            raise ValueError(f"return_sampling_mask requires top_k=1 or finite 1 < top_k <= {most}; got top_k={top_k}.")
        if not 0 < len(obj.input_ids) <= self._arguments["context_length"] - 6:
            raise ValueError(f"The input ({len(obj.input_ids)} tokens) is longer than the model's context length")

    async def _next(self, ids: list[int], params: dict[str, Any]) -> tuple[int, float, float]:
        """One more token, drawn from the seed and the position."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        origin = int(stream_origin(params.get("sampling_seed") or 0, 0)) + len(ids) * int(GOLDEN)
        sampling = SamplingParams(
            1,
            params.get("temperature", 1.0),
            params.get("top_p", 1.0),
            max(0, params.get("top_k", -1)),
            ignore_eos=True,
        )
        self._native.add([Request(number, ids, sampling, origin & MASK64)])
        await asyncio.sleep(0)  # the others add theirs
        while number not in self._done:
            self._done |= {output.id: output for output in self._native.step(1)}
            await asyncio.sleep(0)
        output = self._done.pop(number)
        assert output.finish_reason is FinishReason.LENGTH
        behaviour = output.gen_logprobs_behaviour
        last = output.gen_logprobs if behaviour is None else behaviour
        return int(output.token_ids[0]), float(output.gen_logprobs[0]), float(last[0])

    def _go_wrong(self, made: list[tuple[int, float, float]]) -> None:
        asked = self._calls.count("generate_request")
        if WRONG and asked == 2:
            print("the scheduler hit an exception", file=sys.stderr, flush=True)
        if not WRONG or asked < 3:
            return
        if WRONG == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif WRONG == "hang":
            time.sleep(600)
        elif WRONG == "token":
            made[0] = (1 << 30, *made[0][1:])
        elif WRONG == "nan":
            made[0] = (made[0][0], float("nan"), float("nan"))
        elif WRONG == "short":
            del made[:]
