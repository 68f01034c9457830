"""SGLang's engine, and its calls for decode chunks, weight updates and sleep.

Nothing runs in SGLang between two decode chunks. Each decode chunk requests the next tokens of every response from its
prompt and its tokens so far, which SGLang's prefix cache makes cheap.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpcrl.engines.gen.request_images import image_properties
from hpcrl.engines.gen.sglang.processor_output import ProcessorOutputs
from hpcrl.models.families import SGLANG_SEEING
from hpcrl.spec.media import ImageSpan

NOT_KEPT = "selected a token outside its captured sampling support"
"""SGLang's error text for a token that has no log-prob after truncation."""


class Continuation(msgspec.Struct):
    """A response to continue with at most `left` tokens."""

    id: int
    token_ids: bytes  # int32
    left: int
    sampling: dict[str, Any]  # SGLang's SamplingParams
    salt: str  # separates its entries in the prefix cache from others
    behaviour: bool  # whether log-probs after truncation are wanted
    images: list[ImageSpan]


class Made(msgspec.Struct):
    """The tokens with which a response was continued. The lists come from SGLang, unchecked."""

    id: int
    start: int  # the iteration of the decode chunk in which the first token was generated
    token_ids: list[int]
    logprobs: list[float]
    behaviour: list[float]
    ended: bool  # whether a stop token was generated


class Server:
    """SGLang's engine in this process, with these arguments of ServerArgs."""

    def __init__(self, arguments: Mapping[str, Any]):
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._updating = False
        vision = image_properties(Path(arguments["model_path"]), SGLANG_SEEING)
        self._images = ProcessorOutputs(vision, getattr(torch, arguments["dtype"])) if vision is not None else None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the method with this name."""
        return getattr(self, name)(*arguments)

    def add_images(self, contents: Mapping[bytes, bytes], spans: Sequence[ImageSpan]) -> None:
        """Hold the images of the next decode chunk, with the pixels of those that were not held before, by digest."""
        assert self._images is not None
        self._images.add(contents, spans)

    def decode_chunk(self, jobs: Sequence[Continuation], num_tokens: int, max_num_seqs: int) -> list[Made]:
        """Continue the jobs, in order, in max_num_seqs slots, for num_tokens iterations per slot.

        If one request of a batch truncates or is greedy, SGLang assigns the noise of every request to tokens sorted by
        probability, otherwise by id. A response must not depend on its batch, so these two kinds of jobs run one after
        the other, and a slot has jobs of one kind.
        """
        made: list[Made] = []
        begin, wait = jobs[:max_num_seqs], jobs[max_num_seqs:]

        async def slot(job: Continuation | None, waiting: Iterator[Continuation]) -> None:
            start = 0
            while start < num_tokens and job is not None:
                made.append(await self._generate(job, min(job.left, num_tokens - start), start))
                start += len(made[-1].token_ids)
                job = next(waiting, None)

        async def slots(sorts: bool) -> None:
            waiting = (job for job in wait if _sorts(job) == sorts)
            await asyncio.gather(*(slot(job, waiting) for job in begin if _sorts(job) == sorts))

        for sorts in (False, True):
            self._engine.loop.run_until_complete(slots(sorts))
        return made

    async def _generate(self, job: Continuation, num_tokens: int, start: int) -> Made:
        # Engine.generate() has no argument for log-probs after truncation, so this calls what it calls.
        from sglang.srt.managers.io_struct import GenerateReqInput

        ids = list(memoryview(job.token_ids).cast("i"))
        images = self._images.arguments(ids, job.images, job.salt) if self._images is not None and job.images else {}
        request = GenerateReqInput(
            input_ids=ids,
            sampling_params=job.sampling | {"max_new_tokens": num_tokens},
            return_logprob=True,
            return_sampling_mask=job.behaviour,
            cache_salt=job.salt,
            **images,
        )
        try:
            (answer,) = [answer async for answer in self._engine.tokenizer_manager.generate_request(request)]
        except Exception as error:
            if job.behaviour and NOT_KEPT in str(error):  # NaN has the same error, and is detected in other log-probs
                made = await self._generate(msgspec.structs.replace(job, behaviour=False), num_tokens, start)
                if not all(map(math.isfinite, made.logprobs)):
                    return made
            raise
        tokens, told = list(answer["output_ids"]), answer["meta_info"]
        reason = told["finish_reason"]
        if reason["type"] == "abort":
            raise RuntimeError(f"request {job.id}: SGLang aborted it: {reason.get('message')}")
        if not tokens or (reason["type"] == "length" and len(tokens) < num_tokens):
            raise RuntimeError(f"request {job.id}: SGLang made {len(tokens)} of {num_tokens} tokens: {reason}")
        return Made(
            job.id,
            start,
            tokens,
            [logprob for logprob, *_ in told["output_token_logprobs"]],
            list(told["output_token_sampling_logprobs"]) if job.behaviour else [],
            reason["type"] == "stop",
        )

    def begin_update(self) -> None:
        """Begin a weight update; an interrupted update is ended first."""
        if self._updating:
            self.end_update()
        _succeed(self._engine.begin_weight_update())
        self._updating = True

    def update(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replace some weights."""
        # torch cannot forward a CUDA tensor that came from another process.
        tensors = [(name, tensor.clone() if tensor.is_cuda else tensor) for name, tensor in named]
        _succeed(self._engine.update_weights_from_tensor(tensors, flush_cache=False))

    def end_update(self) -> None:
        """End the weight update."""
        self._updating = False
        _succeed(self._engine.end_weight_update())

    def forget(self) -> None:
        """Empty the prefix cache."""
        answer = self._engine.flush_cache()
        _succeed((answer.success, answer.message))

    def sleep(self, tags: Sequence[str]) -> None:
        """Free these kinds of memory."""
        self._engine.release_memory_occupation(list(tags))

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate these kinds of memory again; their contents are lost."""
        self._engine.resume_memory_occupation(list(tags))

    def close(self) -> None:
        """Shut the engine and its processes down."""
        self._engine.shutdown()


def _sorts(job: Continuation) -> bool:
    """Whether SGLang draws the job's tokens from sorted probabilities."""
    sampling = job.sampling
    return bool(sampling["temperature"] == 0 or sampling["top_p"] < 1 or sampling["top_k"] != -1)


def _succeed(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang: {message}")
