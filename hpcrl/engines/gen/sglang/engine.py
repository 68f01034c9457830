"""SGLang as a generation engine. A replica's first rank starts SGLang, requests the next tokens from it and broadcasts
them to the replica's other ranks. All ranks track all responses.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hpcrl.comm.weight_plan import BUCKET_BYTES
from hpcrl.config import Config
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request
from hpcrl.engines.gen.partial_response import PartialResponse
from hpcrl.engines.gen.request_images import image_properties, spans_of
from hpcrl.engines.gen.sglang.child import Child
from hpcrl.engines.gen.sglang.processor_output import file_name
from hpcrl.engines.gen.sglang.server import Continuation, Made
from hpcrl.engines.gen.sglang.sizes import SPARE_TOKENS, cache_tokens
from hpcrl.engines.gen.sglang.spec import MAX_KEPT, TRUNCATED, SGLangConfig, share
from hpcrl.engines.gen.stops import StopStrings
from hpcrl.engines.gen.weight_names import WeightNames
from hpcrl.models.families import SGLANG_SEEING, read_shape
from hpcrl.models.shape import CannotPlanError
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import IMAGE, ImageSpan

ALONE = ReplicaRanks((0,))
ALL_MEMORY = frozenset({"weights", "kv_cache", "cuda_graph"})
"""The kinds of memory that SGLang can free and allocate separately."""
SEND_TIMEOUT_FRACTION = 0.8
"""Fraction of the run's timeout within which SGLang must answer, so the error names SGLang and not the rank."""
EXPERTS = re.compile(r"(?P<layer>.+\.experts)\.(?P<kind>gate_up|down)_proj")
"""Names of the tensors of all experts in a layer: gate_up_proj [experts, 2 * inner, hidden], with gate rows first, and
down_proj [experts, hidden, inner]."""
PLACE_BYTES = 1024
"""Bytes of a message with a host name and a rank's GPU."""


class Calls(Protocol):
    """A Server in this process or in another one."""

    def call(self, name: str, *arguments: Any) -> Any: ...

    def close(self) -> None: ...


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> SGLangEngine:
    """The engine of a replica, without weights, which the trainer sends. Collective within the replica."""
    own = config.generator.section(SGLangConfig)
    return SGLangEngine(
        model_path,
        tokenizer=tokenizer,
        max_num_seqs=config.generator.max_num_seqs,
        max_length=config.max_sequence_tokens,
        dtype=config.generator.dtype,
        replica=replica,
        cache_tokens=_cache_tokens(config, model_path),
        mem_fraction_static=share(config),
        float32_head=config.generator.head_dtype is not None,
        sleeps=torch.cuda.is_available() and config.layout.generator.colocate_with is not None,
        options=own.options,
        load=False,
        start=functools.partial(
            Child,
            start_s=SEND_TIMEOUT_FRACTION * config.timeouts.start_s,
            call_s=SEND_TIMEOUT_FRACTION * config.timeouts.command_s,
        ),
    )


def _cache_tokens(config: Config, model_path: Path) -> int | None:
    try:
        return cache_tokens(config, read_shape(json.loads((Path(model_path) / "config.json").read_text())))
    except CannotPlanError:
        return None


@dataclass(slots=True)
class _RunningRequest(PartialResponse):
    """A request that has not ended, with its images and its salt."""

    images: list[ImageSpan] = field(default_factory=list)
    salt: str = ""  # separates its entries in the prefix cache from others; empty before its first token


class SGLangEngine:
    """GenEngine of SGLang 0.5.23, for folders in HF layout.

    Args:
        start: Creates the Server from its arguments and its process's environment variables.
        max_num_seqs: Maximum number of requests decoded at once.
        max_length: Maximum number of tokens in prompt and response together.
        cache_tokens: Number of tokens in the KV cache. None means the rest of mem_fraction_static of the GPU.
        sleeps: Whether sleep() frees memory, which needs CUDA.
        options: Additional arguments of SGLang's ServerArgs, by name.
        load: Read the weights from the folder now. False leaves them to load_weights().

    ValueError if SGLang refuses the folder, the sizes or an option, or if the replica's ranks are on several hosts. The
    constructor, load_weights(), step(), sleep() and wake() are collective within the replica.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        start: Callable[[Mapping[str, Any], Mapping[str, str]], Calls],
        tokenizer: Any = None,
        max_num_seqs: int,
        max_length: int,
        dtype: str,
        replica: ReplicaRanks = ALONE,
        cache_tokens: int | None = None,
        mem_fraction_static: float | None = None,
        float32_head: bool = False,
        sleeps: bool = False,
        options: Mapping[str, Any] | None = None,
        load: bool = True,
    ):
        self._replica, self._server = replica, None
        config = json.loads((Path(model_path) / "config.json").read_text())
        arguments = {
            "model_path": str(model_path),
            "skip_tokenizer_init": True,
            "load_format": "auto" if load else "dummy",
            "dtype": dtype,
            "context_length": max_length + SPARE_TOKENS,
            "max_running_requests": max_num_seqs,
            "max_total_tokens": cache_tokens,
            "mem_fraction_static": mem_fraction_static,
            "tp_size": len(replica.ranks),
            "enable_memory_saver": sleeps,
            "enable_deterministic_inference": True,  # without it, SGLang ignores the seeds of requests
            "enable_fp32_lm_head": float32_head,
            "sampling_mask_max_tokens": MAX_KEPT,
            "random_seed": 0,
            "sleep_on_idle": True,  # otherwise, a core of each node polls for work without a pause
        } | dict(options or {})
        devices = _devices(replica)
        if replica.index == 0:
            try:
                self._server = start(arguments, _environment(devices))
            except (TypeError, ValueError) as error:
                named = f" with generator.sglang.options={dict(options)}" if options else ""
                raise ValueError(f"SGLang refuses {model_path}{named}: {' '.join(str(error).split())}") from error
        self.version = 0 if load else -1
        self.max_num_seqs = max_num_seqs
        self._sleeps, self._asleep = sleeps, frozenset[str]()
        self._max_length, self._vocab_size = max_length, int(config.get("text_config", config)["vocab_size"])
        self._names = WeightNames.of(Path(model_path))
        self._vision = image_properties(Path(model_path), SGLANG_SEEING)
        self._sent: set[bytes] = set()  # the digests of the images that SGLang's process holds
        self._stops = StopStrings(tokenizer, self._vocab_size) if tokenizer is not None else None
        self._growing: dict[int, _RunningRequest] = {}
        self._num_added = 0

    def add(self, requests: Sequence[Request]) -> None:
        """See GenEngine. ValueError also if SGLang cannot return the request's log-probs."""
        check_requests(
            requests,
            self._growing,
            max_length=self._max_length,
            vocab_size=self._vocab_size,
            has_tokenizer=self._stops is not None,
            media=(IMAGE,) if self._vision is not None else (),
            vision=self._vision,
        )
        for request in requests:
            if request.params.truncates and (request.params.min_p or not 2 <= self._top_k(request) <= MAX_KEPT):
                raise ValueError(f"request {request.id}: {TRUNCATED}, and not with top_k 1 or min_p")
        for request in requests:
            self._growing[request.id] = _RunningRequest(request, self._num_added, images=spans_of(request))
            self._num_added += 1

    def abort(self, ids: Sequence[int]) -> list[Output]:
        """See GenEngine. Between two decode chunks SGLang has no requests."""
        ended = [i for i in dict.fromkeys(ids) if i in self._growing]
        return [self._growing.pop(i).output(FinishReason.ABORT) for i in ended]

    def step(self, num_tokens: int) -> list[Output]:
        """See GenEngine. Which waiting request gets a slot that becomes free within the step may depend on timing, but
        its tokens do not. ValueError if no weights are loaded; RuntimeError if SGLang's answer is malformed."""
        if not self._growing:
            return []
        if self.version < 0:
            raise ValueError("the generator has no weights: call load_weights() before step()")
        self._wake(ALL_MEMORY)
        first = sorted(self._growing.values(), key=lambda growing: not growing.token_ids)
        jobs = [self._job(growing) for growing in first] if self._server is not None else []
        if self._server is not None and self._vision is not None:
            self._send_images(self._server)
        made = msgspec.msgpack.decode(self._ask("decode_chunk", jobs, num_tokens, self.max_num_seqs), type=list[Made])
        ended: list[tuple[int, int, FinishReason, _RunningRequest]] = []
        for item in made:
            growing = self._growing[item.id]
            before = len(growing.token_ids)
            if (reason := self._extend(growing, item)) is not None:
                iteration = item.start + len(growing.token_ids) - before
                ended.append((iteration, growing.order, reason, growing))
        ended.sort(key=lambda end: end[:2])
        return [self._growing.pop(growing.request.id).output(reason) for *_, reason, growing in ended]

    def progress(self) -> dict[int, int]:
        """See GenEngine."""
        return {i: len(growing.token_ids) for i, growing in self._growing.items()}

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See GenEngine. An iterator is consumed tensor by tensor; if the update fails, the engine has no weights
        (version -1). If no request is running, the prefix cache is emptied; otherwise, only running requests still use
        its prefixes."""
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        if not isinstance(named, Iterator):
            named = list(named)
            self._names.check(named)
        self.version = -1
        self.wake()
        if self._server is None:
            for _ in named:
                pass
        else:
            weights = one_by_one(self._names.checked(named), bool(self._names))
            if self._vision is not None:
                weights = ((file_name(name), tensor) for name, tensor in weights)
            self._update(self._server, weights)
        self._ask("end_update")
        if not any(growing.token_ids for growing in self._growing.values()):
            self._ask("forget")
        self.version = version

    def recompute(self) -> None:
        """See GenEngine. Running requests then use only prefixes computed with the new weights."""
        if self.version < 0 and self._growing:
            raise ValueError("the generator has no weights: call load_weights() before recompute()")
        for growing in self._growing.values():
            growing.salt = str(self.version) if growing.salt else ""

    def sleep(self) -> None:
        """See GenEngine. Without `sleeps`, SGLang keeps its memory."""
        if running := sum(1 for growing in self._growing.values() if growing.token_ids):
            raise ValueError(f"cannot sleep while {running} requests are running: abort or finish them")
        self.version = -1
        if self._sleeps and (awake := ALL_MEMORY - self._asleep):
            self._ask("sleep", sorted(awake))
            self._asleep = ALL_MEMORY

    def wake(self) -> None:
        """See GenEngine. step() allocates the KV cache, since the trainer still uses GPU memory in load_weights()."""
        self._wake(frozenset({"weights"}))

    def close(self) -> None:
        """See GenEngine."""
        self.abort(list(self._growing))
        if self._server is not None:
            self._server.close()

    def _wake(self, tags: frozenset[str]) -> None:
        """Allocate these kinds of memory again if they have been freed."""
        if tags & self._asleep:
            self._ask("wake", sorted(tags & self._asleep))
        self._asleep -= tags

    def _ask(self, name: str, *arguments: Any) -> bytes:
        """SGLang's answer to a call, as msgpack, on every rank of the replica."""
        answer = b""
        if self._server is not None:
            answer = msgspec.msgpack.encode(self._server.call(name, *arguments))
        return _from_first(self._replica, answer)

    def _send_images(self, server: Calls) -> None:
        """Send images that SGLang's process does not hold, once each, and let it drop those of no request."""
        contents: dict[bytes, bytes] = {}
        spans = [span for growing in self._growing.values() for span in growing.images]
        for growing in self._growing.values():
            for medium, span in zip(growing.request.media, growing.images, strict=True):
                if span.digest not in self._sent:
                    contents[span.digest] = medium.content
        used = {span.digest for span in spans}
        if used != self._sent:
            server.call("add_images", contents, spans)
            self._sent = used

    def _job(self, growing: _RunningRequest) -> Continuation:
        request, params = growing.request, growing.request.params
        return Continuation(
            id=request.id,
            token_ids=np.array([*request.prompt_ids, *growing.token_ids], dtype=np.int32).tobytes(),
            left=params.max_new_tokens - len(growing.token_ids),
            sampling={
                "temperature": float(params.temperature),
                "top_p": float(params.top_p),
                "top_k": self._top_k(request) if params.truncates else -1,
                # SGLang draws from seed and position, so a response does not depend on the boundaries of decode chunks.
                "sampling_seed": request.seed - (request.seed >> 63 << 64),  # converted to a signed number
                "stop_token_ids": set(params.stop_token_ids),
                "ignore_eos": params.ignore_eos,
            },
            salt=growing.salt or str(self.version),
            behaviour=params.truncates,
            images=growing.images,
        )

    def _top_k(self, request: Request) -> int:
        return request.params.top_k or self._vocab_size

    def _extend(self, growing: _RunningRequest, made: Made) -> FinishReason | None:
        """Add new tokens to a request, up to its end. Returns its finish reason, if it has ended."""
        request, count = growing.request, len(made.token_ids)
        if not count == len(made.logprobs) == len(made.behaviour or made.logprobs):
            raise RuntimeError(
                f"request {request.id}: SGLang gave {count} tokens, {len(made.logprobs)} log-probs and "
                f"{len(made.behaviour)} after truncation"
            )
        if wrong := [token for token in made.token_ids if not 0 <= token < self._vocab_size]:
            raise RuntimeError(
                f"request {request.id}: SGLang gave the token {wrong[0]}, outside the vocabulary of {self._vocab_size}"
            )
        if not np.isfinite([*made.logprobs, *made.behaviour]).all():
            raise FloatingPointError(
                f"request {request.id}: the log-probs are not finite under weights version {self.version}"
            )
        before = len(growing.token_ids)
        growing.salt = growing.salt or str(self.version)
        growing.token_ids += made.token_ids
        kept = self._until_stop(growing, before)
        del growing.token_ids[kept:]
        growing.logprobs += made.logprobs[: kept - before]
        growing.behaviour += made.behaviour[: kept - before]
        growing.versions += [self.version] * (kept - before)
        if kept < before + count or made.ended or self._is_stop(growing, kept):
            return FinishReason.STOP
        return FinishReason.LENGTH if kept >= request.params.max_new_tokens else None

    def _until_stop(self, growing: _RunningRequest, before: int) -> int:
        """Number of tokens up to and including the first one, from index `before` on, that ends the response; all if
        none does. This is needed because SGLang ignores stop ids with ignore_eos, and gets no stop strings."""
        ends = (n for n in range(before + 1, len(growing.token_ids) + 1) if self._is_stop(growing, n))
        return next(ends, len(growing.token_ids))

    def _is_stop(self, growing: _RunningRequest, count: int) -> bool:
        """Whether the first `count` tokens end with a stop id or complete a stop string."""
        params, token = growing.request.params, growing.token_ids[count - 1]
        if token in params.stop_token_ids:
            return True
        if not params.stop or self._stops is None or not self._stops.closers(params.stop)[token]:
            return False
        return self._stops.completes(
            params.stop, growing.token_ids[max(0, count - self._stops.window(params.stop)) : count]
        )

    @staticmethod
    def _update(server: Calls, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the weights in buckets. Tensors are copied, since their memory may be reused before a bucket is full."""
        server.call("begin_update")
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in named:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                server.call("update", bucket)
                bucket, size = [], 0
            bucket.append((name, tensor.detach().clone()))
            size += tensor.nbytes
        if bucket:
            server.call("update", bucket)


def one_by_one(named: Iterable[tuple[str, torch.Tensor]], known: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under their names in files, with separate tensors per expert, since SGLang silently skips unknown
    names such as transformers' name for all experts of a layer. `known`: hpcrl knows the parameters of this family, so
    names of experts are known; ValueError for experts of other families."""
    for name, tensor in named:
        if (match := EXPERTS.fullmatch(name)) is None:
            yield name, tensor
            continue
        if not known:
            raise ValueError(f"weight {name}: SGLang's names for the experts of this model's family are unknown")
        for expert, matrix in enumerate(tensor):
            kinds = {"gate_up": ("gate", "up"), "down": ("down",)}[match["kind"]]
            for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                yield f"{match['layer']}.{expert}.{kind}_proj.weight", part


def _from_first(replica: ReplicaRanks, data: bytes) -> bytes:
    """Broadcast data from the replica's first rank to all of its ranks."""
    if replica.group is None:
        return data
    size = torch.tensor([len(data)])
    replica.group.broadcast([size], dist.BroadcastOptions()).wait()
    # One byte is added because gloo refuses empty tensors.
    tensor = torch.zeros(int(size.item()) + 1, dtype=torch.uint8)
    if replica.index == 0:
        tensor[:-1] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else tensor[:-1]
    replica.group.broadcast([tensor], dist.BroadcastOptions()).wait()
    return tensor[:-1].numpy().tobytes()


def _devices(replica: ReplicaRanks) -> str | None:
    """The GPUs of the replica's ranks, in order, as CUDA_VISIBLE_DEVICES; None on CPUs. ValueError if the ranks are on
    several hosts."""
    own = f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    places = [own]
    if replica.group is not None:
        told = torch.frombuffer(bytearray(own.encode().ljust(PLACE_BYTES)), dtype=torch.uint8)
        parts = [torch.empty_like(told) for _ in replica.ranks]
        replica.group.allgather([parts], [told]).wait()
        places = [part.numpy().tobytes().decode().rstrip() for part in parts]
    hosts = [place.partition(" ")[0] for place in places]
    if len(set(hosts)) > 1:
        raise ValueError(
            f"layout.generator.tensor_parallel: the ranks {replica.ranks} of a replica are on {', '.join(hosts)}, and "
            "SGLang starts all its processes on one host; use fewer ranks per replica, or generator.engine=vllm"
        )
    devices = [place.partition(" ")[2] for place in places]
    return ",".join(devices) if torch.cuda.is_available() and all(devices) else None


def _environment(devices: str | None) -> dict[str, str]:
    """Environment variables of SGLang's process, whose context is a little longer than the model's (SPARE_TOKENS)."""
    own = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    # HIP prefers its own variable, in which this rank has only its own GPU.
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return own if devices is None else own | dict.fromkeys(names, devices)
