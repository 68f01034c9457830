"""vLLM in the rank's process: its engine runs between the controller's commands.

A replica of several ranks is tensor parallel. Every rank has its own engine; all engines get the same calls in the same
order, so their schedulers make the same decisions (vLLM's `external_launcher`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.config import Config, LoRAConfig
from hpcrl.engines.expert_routes import RouteShape, routes_of
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import NOTHING_KEPT, Output, ReplicaRanks, Request
from hpcrl.engines.gen.partial_response import PartialResponse
from hpcrl.engines.gen.request_images import image_properties
from hpcrl.engines.gen.sampling import stream_origin
from hpcrl.engines.gen.stops import StopStrings
from hpcrl.engines.gen.vllm.amx import follow_onednn_limit
from hpcrl.engines.gen.vllm.cpu_routers import route_in_one_group
from hpcrl.engines.gen.vllm.cpu_states import states_at_chunk_ends
from hpcrl.engines.gen.vllm.heads import check_head_size
from hpcrl.engines.gen.vllm.image_prompts import TEXT_ONLY, ImagePrompts, keep_pixels, own_image_sizes
from hpcrl.engines.gen.vllm.image_prompts import arguments as image_arguments
from hpcrl.engines.gen.vllm.lora_loading import Adapter
from hpcrl.engines.gen.vllm.lora_loading import arguments as adapter_arguments
from hpcrl.engines.gen.vllm.memory import cache
from hpcrl.engines.gen.vllm.published import Published, config_overrides
from hpcrl.engines.gen.vllm.replica import arguments as replica_arguments
from hpcrl.engines.gen.vllm.replica import keeping_default_group, world_of
from hpcrl.engines.gen.vllm.rotation import rotate_all_heads
from hpcrl.engines.gen.vllm.routes import RouteRecorder
from hpcrl.engines.gen.vllm.sampler import Drawing, Sampler
from hpcrl.engines.gen.vllm.slices import are_known
from hpcrl.engines.gen.vllm.spec import VLLMConfig, shares_gpu, start_share
from hpcrl.engines.gen.vllm.transformers_classes import transformers_classes_kept
from hpcrl.engines.gen.vllm.weight_readback import shown
from hpcrl.engines.gen.vllm.weights import as_published, reload
from hpcrl.engines.gen.weight_names import WeightNames
from hpcrl.models.families import VLLM_SEEING, known_shape, read_vision_of, shape_of
from hpcrl.models.shape import CannotPlanError
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import IMAGE
from hpcrl.spec.trajectory import Field

ALONE = ReplicaRanks((0,))

# vLLM reads these when it is imported below. The engine runs in this process, and Sampler replaces the sampler of the
# first model runner, which would compile FlashInfer's kernels to warm up.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
for _name, _default in (
    ("VLLM_LOGGING_LEVEL", "ERROR"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_NO_USAGE_STATS", "1"),
):
    os.environ.setdefault(_name, _default)


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> VLLMEngine:
    """The engine of a replica, without weights, which the trainer sends. Collective within the replica."""
    own = config.generator.section(VLLMConfig)
    return VLLMEngine(
        model_path,
        tokenizer=tokenizer,
        max_num_seqs=config.generator.max_num_seqs,
        max_length=config.max_sequence_tokens,
        dtype=config.generator.dtype,
        replica=replica,
        cache_bytes=_cache_bytes(config, own, model_path),
        gpu_memory_utilization=start_share(config),
        enforce_eager=own.enforce_eager or not torch.cuda.is_available(),
        head_dtype=config.generator.head_dtype,
        sleeps=shares_gpu(config),
        custom_all_reduce=own.custom_all_reduce,
        options=own.options,
        routes=routes_of(config, model_path),
        lora=config.published_lora,
        max_pixels=config.data.max_pixels,
        max_image_tokens=config.max_image_tokens,
        load=False,
    )


def _cache_bytes(config: Config, own: VLLMConfig, model_path: Path) -> int | None:
    """Bytes of the KV cache on one rank; None means the rest of the GPU's share. ValueError on a CPU if neither the key
    nor the plan defines it."""
    if own.kv_cache_bytes is not None or torch.cuda.is_available():
        return own.kv_cache_bytes
    try:
        return cache(config, shape_of(str(model_path), "model.path"))[0]
    except CannotPlanError as error:
        text = "the size of this model's KV cache is unknown; on a CPU set generator.vllm.kv_cache_gib"
        raise ValueError(f"{text} ({error})") from None


@dataclass(slots=True)
class _RunningRequest(PartialResponse):
    """A request that has not ended, with its random stream and routes."""

    origin: np.uint64 = field(kw_only=True)  # the origin of the stream from which its tokens are drawn
    routes: bytearray = field(default_factory=bytearray)  # the chosen experts of each token, concatenated

    @property
    def drawing(self) -> Drawing:
        return Drawing(self.request.params, self.origin, len(self.token_ids))

    def columns(self, routes: Field | None) -> dict[str, np.ndarray]:
        """The additional columns of its output."""
        if routes is None:
            return {}
        return {"routes": np.frombuffer(self.routes, routes.travels_as).reshape(routes.shape(len(self.token_ids)))}


class VLLMEngine:
    """GenEngine of vLLM 0.32, for folders in HF layout.

    Args:
        max_num_seqs: Maximum number of requests decoded at once.
        max_length: Maximum number of tokens in prompt and response together.
        cache_bytes: Bytes of the KV cache on each rank. None means the rest of gpu_memory_utilization of the GPU.
        head_dtype: Data type of the vocabulary projection. None means `dtype`.
        sleeps: Whether sleep() calls vLLM's sleep, which frees memory on GPUs.
        custom_all_reduce: Use vLLM's own all-reduce. The replica's ranks must see each other's GPUs.
        options: Additional arguments of vLLM's EngineArgs, by name.
        routes: Record the chosen experts in the column `routes` of outputs.
        lora: load_weights() gets adapters, and vLLM reads all other weights.
        max_pixels: Maximum pixels of an image. None means the maximum of the folder.
        max_image_tokens: No prompt has an image with more tokens. None means max_length.
        load: Read the weights from the folder now. False leaves them to load_weights().

    ValueError if vLLM refuses the folder, the sizes or an option. The constructor is collective within the replica.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        tokenizer: Any = None,
        max_num_seqs: int,
        max_length: int,
        dtype: str,
        replica: ReplicaRanks = ALONE,
        cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = True,
        head_dtype: str | None = None,
        sleeps: bool = False,
        custom_all_reduce: bool = False,
        options: Mapping[str, Any] | None = None,
        routes: RouteShape | None = None,
        lora: LoRAConfig | None = None,
        max_pixels: int | None = None,
        max_image_tokens: int | None = None,
        load: bool = True,
    ):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = {
            "model": str(model_path),
            "skip_tokenizer_init": True,
            "load_format": "auto" if load or lora is not None else "dummy",
            "dtype": dtype,
            "max_model_len": max_length,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": cache_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": enforce_eager,
            "hf_overrides": config_overrides(Path(model_path)) | ({"head_dtype": head_dtype} if head_dtype else {}),
            "enable_sleep_mode": sleeps and torch.cuda.is_available(),
            "enable_prefix_caching": True,
            "async_scheduling": False,  # a step must return its own tokens
            "seed": 0,
        }
        vision = image_properties(Path(model_path), VLLM_SEEING)
        reserved: int | None = None  # tokens of the largest image
        if vision is not None:
            vision = vision if max_pixels is None else vision.limited(max_pixels)
            reserved = min(vision.max_tokens, max_image_tokens or max_length)
            _check_torchvision(model_path)
            keep_pixels()
            arguments |= image_arguments(vision, reserved)
        elif read_vision_of(Path(model_path)) is not None:
            _check_torchvision(model_path)
            arguments |= TEXT_ONLY
        arguments |= replica_arguments(len(replica.ranks), custom_all_reduce) | dict(options or {})
        if lora is not None:
            arguments |= adapter_arguments(lora, Path(model_path))
        self._sleeps, self._asleep, self._shares_group = sleeps, False, dist.is_initialized()
        self._routes = routes.field if routes is not None else None
        recorder = RouteRecorder(routes) if routes is not None else None
        recorded = recorder.bound() if recorder is not None else contextlib.nullcontext()
        follow_onednn_limit()
        with world_of(replica), transformers_classes_kept(), recorded, _unchanged_random_state():
            try:
                config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
                check_head_size(config)
                rotate_all_heads(config)
                with own_image_sizes(config.model_config, reserved), states_at_chunk_ends():
                    self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            except (TypeError, ValueError) as error:
                named = f" with generator.vllm.options={dict(options)}" if options else ""
                text = " ".join(str(error).partition(" [type=")[0].split())  # in one line: pydantic's text has several
                raise ValueError(f"vLLM refuses {model_path}{named}: {text}") from error
        route_in_one_group(self._runner.get_model())
        self.version = 0 if load else -1
        self.max_num_seqs = max_num_seqs
        self._max_length, self._vocab_size = max_length, config.model_config.get_vocab_size()
        self._model_type = str(config.model_config.hf_config.model_type)
        self._sees = hasattr(config.model_config.hf_config, "vision_config")  # even if the run has no images
        self._vision = vision
        self._images = ImagePrompts(vision, config.model_config.dtype) if vision is not None else None
        self._names, self._model = WeightNames.of(Path(model_path), lora), known_shape(Path(model_path))
        self._replica, self._options = replica, dict(options or {})
        self._adapter = Adapter(self._runner, lora) if lora is not None else None
        self._stops = StopStrings(tokenizer, self._vocab_size) if tokenizer is not None else None
        self._growing: dict[int, _RunningRequest] = {}
        self._num_added = 0
        self._sampler = Sampler(self._runner, lambda ids: [self._growing[i].drawing for i in ids], recorder)

    def add(self, requests: Sequence[Request]) -> None:
        """See GenEngine."""
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
            self._queue(request)
            self._growing[request.id] = _RunningRequest(request, self._num_added, origin=stream_origin(request.seed, 0))
            self._num_added += 1

    def abort(self, ids: Sequence[int]) -> list[Output]:
        """See GenEngine."""
        ended = [i for i in dict.fromkeys(ids) if i in self._growing]
        self._engine.abort_request([str(i) for i in ended])
        dropped = [self._growing.pop(i) for i in ended]
        return [growing.output(FinishReason.ABORT, growing.columns(self._routes)) for growing in dropped]

    def step(self, num_tokens: int) -> list[Output]:
        """See GenEngine. ValueError if the weights are not loaded."""
        if self.version < 0 and self._growing:
            raise ValueError("the generator has no weights: call load_weights() before step()")
        if self._growing and self._sleeps and self._engine.is_sleeping():
            self._engine.wake_up(["kv_cache"])
        finished: list[Output] = []
        for _ in range(num_tokens):
            if not self._growing:
                break
            finished += self._iterate()
        return finished

    def progress(self) -> dict[int, int]:
        """See GenEngine."""
        return {i: len(growing.token_ids) for i, growing in self._growing.items()}

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int, kept: Collection[str] = ()) -> None:
        """See KeepsWeights. An iterator is consumed tensor by tensor; if it fails, the engine has no weights (version
        -1)."""
        if version < 0:
            raise ValueError(f"weights version is {version}, 0 or more is needed")
        if kept and self.version < 0:
            raise ValueError(NOTHING_KEPT)
        if not isinstance(named, Iterator):
            named = list(named)
            self._names.check(named, kept)
        self.version = -1
        self.wake()
        # vLLM keeps a layer's tensors until it has all of them, and the sender may overwrite its buffer earlier.
        model = self._runner.get_model()
        checked, arrived = self._names.checked(named, kept), set[str]()
        conversion = Published("" if self._sees else self._model_type)

        def copies() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in checked:
                arrived.add(name)
                for published, values in conversion.of(*as_published(model, self._model_type, name, tensor)):
                    yield published, values.clone()

        features = dict(self._runner.encoder_cache)
        with torch.inference_mode():
            if self._adapter is not None:
                self._adapter.load(dict(copies()))
            else:
                reload(self._engine, model, copies(), complete=not kept)
        if self._vision is not None and any(name.startswith(self._vision.towers) for name in arrived):
            self._engine.reset_encoder_cache()  # the outputs of the previous tower
        else:
            self._runner.encoder_cache.update(features)  # which vLLM's worker has dropped, but not its scheduler
        self.version = version
        waiting = [growing.request for growing in self._growing.values() if not growing.token_ids]
        self._engine.abort_request([str(request.id) for request in waiting])
        for request in waiting:  # otherwise, they would reuse prefixes computed with the previous weights
            self._queue(request)

    def loaded_weights(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See ReadsBackWeights. Yields nothing with adapters, or if it is not known how vLLM splits the model."""
        if self._adapter is None and self._model is not None and are_known(self._options, self._model):
            place = self._replica.index, len(self._replica.ranks)
            yield from shown(self._runner.get_model(), self._model, names, self._options, *place)

    def recompute(self) -> None:
        """See GenEngine. Running requests are preempted, and their tokens are prefilled again."""
        if self.version < 0 and self._growing:
            raise ValueError("the generator has no weights: call load_weights() before recompute()")
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """See GenEngine. Without `sleeps`, vLLM keeps its memory."""
        if running := sum(1 for growing in self._growing.values() if growing.token_ids):
            raise ValueError(f"cannot sleep while {running} requests are running: abort or finish them")
        if self._sleeps and not self._asleep:
            # At level 1, vLLM keeps the weights in host memory, since frozen weights under adapters are not sent again.
            self._engine.sleep(level=2 if self._adapter is None else 1, mode="keep")
            self._asleep = True
        self.version = -1

    def wake(self) -> None:
        """See GenEngine. step() allocates the KV cache, since the trainer still uses GPU memory in load_weights()."""
        if self._asleep:
            self._engine.wake_up(["weights"])
            self._asleep = False

    def close(self) -> None:
        """See GenEngine."""
        self.abort(list(self._growing))
        with keeping_default_group() if self._shares_group else contextlib.nullcontext():
            self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()

    @property
    def _runner(self) -> Any:
        """vLLM's model runner of this rank."""
        return self._engine.model_executor.driver_worker.worker.model_runner

    def _queue(self, request: Request) -> None:
        # The salt separates prefixes cached under different weights; a response that continues keeps its salt.
        salt = str(self.version)
        if self._images is not None and request.media:
            prompt = self._images.prompt(request, salt)
        else:
            prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        adapter = self._adapter.request if self._adapter is not None else None
        self._engine.add_request(str(request.id), prompt, _limits(request), lora_request=adapter)

    def _iterate(self) -> list[Output]:
        """One iteration of vLLM's engine."""
        done: list[tuple[_RunningRequest, FinishReason]] = []
        for result in self._engine.step():
            growing = self._growing.get(int(result.request_id))
            if growing is None:
                continue
            (made,) = result.outputs
            for token in made.token_ids:
                self._append(growing, int(token), *self._sampler.drawn(growing.request.id))
            if made.finish_reason == "stop" or self._completes_stop(growing):
                done.append((growing, FinishReason.STOP))
                if made.finish_reason is None:
                    self._engine.abort_request([result.request_id])
            elif made.finish_reason == "length":
                done.append((growing, FinishReason.LENGTH))
            elif made.finish_reason is not None:
                raise RuntimeError(f"request {growing.request.id}: vLLM ended it with {made.finish_reason!r}")
        done.sort(key=lambda ended: ended[0].order)
        for growing, _ in done:
            del self._growing[growing.request.id]
        return [growing.output(reason, growing.columns(self._routes)) for growing, reason in done]

    def _append(self, growing: _RunningRequest, token: int, logprob: float, behaviour: float, routes: bytes) -> None:
        if not 0 <= token < self._vocab_size:
            text = f"vLLM gave the token {token}, outside the vocabulary of {self._vocab_size}"
            raise RuntimeError(f"request {growing.request.id}: {text}")
        growing.token_ids.append(token)
        growing.routes += routes
        growing.versions.append(self.version)
        growing.logprobs.append(logprob)
        growing.behaviour.append(behaviour)
        if not np.isfinite(behaviour):
            raise FloatingPointError(
                f"request {growing.request.id}: the logits are not finite under weights version {self.version}"
            )

    def _completes_stop(self, growing: _RunningRequest) -> bool:
        stop = growing.request.params.stop
        if not stop or not growing.token_ids or self._stops is None:
            return False
        if not self._stops.closers(stop)[growing.token_ids[-1]]:
            return False
        return self._stops.completes(stop, growing.token_ids[-self._stops.window(stop) :])


def _check_torchvision(model_path: Path) -> None:
    if not find_spec("torchvision"):
        raise ValueError(
            f"vLLM's classes of {model_path} import torchvision, which is not installed; install the version that fits "
            "your torch"
        )


@contextlib.contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Context that restores the random state, because vLLM seeds the process's random generators."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _limits(request: Request) -> Any:
    """vLLM's parameters for a request, which only define when it ends; hpcrl.engines.gen.vllm.sampler draws tokens.
    vLLM would cut stop strings off, so hpcrl searches for them, in tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request.params
    return SamplingParams(
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
