"""hpcrl.Generator: responses to a few prompts, in this process, with the native engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.launch.model_folder import NO_TOKENIZER, inspect_model
from hpcrl.models.families import NATIVE
from hpcrl.python.handle import RunHandle
from hpcrl.rollout.types import GREEDY_MEMBER, make_sample_id, sampling_seed
from hpcrl.spec.tables import GEN_ENGINES

if TYPE_CHECKING:
    from hpcrl.engines.gen.generation_engine import Output, Request
    from hpcrl.engines.gen.native.given_tokens import GivenTokens

CHUNK_TOKENS = 32
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GeneratedResponse:
    """A response. `text` is as a reward gets it; `logprobs` has log-softmax(logits / temperature) for each of
    `token_ids`, at temperature 1 if greedy; `finish_reason` is stop or length."""

    text: str
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    finish_reason: str


class Generator:
    """A model folder in HF layout, or the exported model of a run, on one GPU or on CPUs.

    ValueError in one line for a folder without model or tokenizer, or a model that the native engine does not run.

    Args:
        dtype: auto: of the folder's weights.
        max_length: Tokens of a prompt with its response at most; None: 4096, or the model's limit if that is less.
        max_num_seqs: Responses decoded at once; more wait.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | RunHandle,
        *,
        dtype: Dtype = "auto",
        max_length: int | None = None,
        max_num_seqs: int = 16,
    ):
        path = folder.hf if isinstance(folder, RunHandle) else Path(folder)
        limit = _check(path)
        import torch
        from transformers import AutoTokenizer

        from hpcrl.data.chat import end_ids
        from hpcrl.data.reasoning import TurnTexts
        from hpcrl.engines.gen.native.engine import NativeEngine

        self.path, self.max_length = path, max_length or min(4096, limit)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._texts, self._end_ids = TurnTexts(self.tokenizer), end_ids(self.tokenizer)
        self._engine = NativeEngine(
            path,
            tokenizer=self.tokenizer,
            max_num_seqs=max_num_seqs,
            max_length=self.max_length,
            dtype=getattr(torch, _dtype(path) if dtype == "auto" else dtype),
            device="cuda" if torch.cuda.is_available() else "cpu",
        )

    def __repr__(self) -> str:
        return f"hpcrl.Generator({str(self.path)!r})"

    def generate(
        self,
        prompts: str | Conversation | Sequence[str | Conversation],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_new_tokens: int = 256,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[list[GeneratedResponse]]:
        """For each prompt, its `n` responses.

        Args:
            prompts: Texts, each a user message if the tokenizer has a chat template, and lists of messages; one prompt
                alone is a list of one.
            temperature: 0 is greedy.
            seed: With the prompt's index and the response's, determines the samples.

        ValueError for an invalid argument, or a prompt that is too long.
        """
        from hpcrl.engines.gen.generation_engine import Request, SamplingParams

        if not 1 <= n < GREEDY_MEMBER:
            raise ValueError(f"n is {n}; give 1 to {GREEDY_MEMBER - 1} responses a prompt")
        params = SamplingParams(
            max_new_tokens, temperature, top_p, top_k, stop=tuple(stop), stop_token_ids=self._end_ids
        )
        encoded = [self._encode(prompt, index) for index, prompt in enumerate(_as_list(prompts))]
        requests, numbers = [], count()
        for index, ids in enumerate(encoded):
            for member in range(n):
                chosen = sampling_seed(seed, make_sample_id(index, 0, member))
                requests.append(Request(next(numbers), ids, params, chosen))
        ordered = self.respond(requests)
        texts = self._texts.of([output.token_ids.tolist() for output in ordered], [r.prompt_ids for r in requests])
        responses = [
            GeneratedResponse(text, output.token_ids.tolist(), output.gen_logprobs.tolist(), str(output.finish_reason))
            for text, output in zip(texts, ordered, strict=True)
        ]
        return [responses[index * n : (index + 1) * n] for index in range(len(encoded))]

    def respond(self, requests: Sequence[Request]) -> list[Output]:
        """The engine's outputs of requests, which are tokens: neither template nor end tokens are added. ValueError as
        generate()."""
        outputs: dict[int, Output] = {}
        try:
            self._engine.add(requests)
            while self._engine.progress():
                outputs |= {output.id: output for output in self._engine.step(CHUNK_TOKENS)}
        finally:
            self._engine.abort(list(self._engine.progress()))  # after an interrupt
        return [outputs[request.id] for request in requests]

    def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[GivenTokens]:
        """Of rows (prompt, response) of tokens: `logprobs`, log-softmax(logits) of each of the response's tokens,
        float32 [n], and `greedy`, whether each is the most probable one. ValueError for a row that is too long or has
        an empty part."""
        return self._engine.logprobs(rows)

    def close(self) -> None:
        """Free the memory of weights and cache; the object generates no more."""
        self._engine.close()

    def _encode(self, prompt: str | Conversation, index: int) -> list[int]:
        from hpcrl.data.chat import encode, render
        from hpcrl.data.files import BadRow
        from hpcrl.data.messages import read_messages
        from hpcrl.data.template_forms import TemplateRefusal

        where = f"prompt {index}"
        try:
            messages = read_messages(prompt if isinstance(prompt, str) else list(prompt), where, "messages")
            return encode(self.tokenizer, render(self.tokenizer, messages, None))
        except (BadRow, TemplateRefusal) as error:
            text = str(error)
            raise ValueError(text if text.startswith(where) else f"{where}: {text}") from error


def _as_list(prompts: str | Conversation | Sequence[str | Conversation]) -> list[str | Conversation]:
    """A list of prompts; one prompt alone is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    given: list[Any] = list(prompts)
    return [given] if given and all(isinstance(each, Mapping) for each in given) else given


def _check(folder: Path) -> int:
    """The model's maximum length. ValueError if the folder lacks what a generator needs, or for another engine's
    model."""
    found = inspect_model(folder)
    if found.problems:
        lacking = [line for line in found.problems if NO_TOKENIZER in line] or found.problems
        raise ValueError(lacking[0].removeprefix("model.path: "))
    if found.model_type not in NATIVE:
        others = [name for name, spec in GEN_ENGINES.items() if spec.families is None and name != "fake"]
        raise ValueError(
            f"{folder}: the native engine does not run model_type {found.model_type}; use "
            f"{' or '.join(others)}, in a run with generator.engine, or in a program of its own"
        )
    return found.max_positions or 4096


def _dtype(folder: Path) -> str:
    """The number type of the folder's weights, by config.json; float32 if it does not say."""
    config = json.loads((folder / "config.json").read_text())
    held = config.get("dtype", config.get("torch_dtype"))
    return held if held in ("float32", "bfloat16", "float16") else "float32"
