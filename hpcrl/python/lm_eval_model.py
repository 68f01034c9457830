"""The model `hpcrl` of lm-evaluation-harness: a folder in HF layout, with the native engine.

`python -m hpcrl.python.lm_eval` has it, and so has a program that imports this module (docs/evaluation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.launch.model_folder import inspect_model
from hpcrl.python.prompting import Dtype, Generator
from hpcrl.rollout.types import make_sample_id, sampling_seed

DEFAULT_LENGTH = 2048
"""max_length of a model whose config.json does not limit it."""
MAX_GEN_TOKENS = 256
"""Tokens of a response, if the task does not say."""
AT_ONCE = 64
"""Requests between two steps of the progress bar, in multiples of max_num_seqs."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1}
"""Arguments of transformers' generate that only their neutral value passes."""


@register_model("hpcrl")
class HpcrlLM(TemplateLM):  # type: ignore[misc]  # lm_eval may be absent
    """Log-likelihoods and responses by the native engine, with the tokens that the harness's `hf` gives its model.
    ValueError in one line as hpcrl.Generator, and for an argument that is not one of these.

    Args:
        path: A model folder with tokenizer, such as runs/NAME/hf.
        dtype: auto (of the folder's weights), float32, bfloat16 or float16.
        max_length: Tokens of a context with its continuation; by default the model's limit. Longer contexts lose their
            beginning, as those of `hf`.
        max_num_seqs: Responses decoded at once; by default the harness's batch_size if that is above 1, else 16.
        add_bos_token: Whether contexts begin with special tokens; None: as the tokenizer does.
        think_end_token: Text before the last one of these is not part of a response.
        enable_thinking: Passed to the chat template, if given.
        seed: Of responses with do_sample.
    """

    def __init__(
        self,
        path: str,
        dtype: Dtype = "auto",
        max_length: int | None = None,
        max_num_seqs: int | None = None,
        add_bos_token: bool | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        seed: int = 0,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **others: Any,
    ):
        super().__init__()
        if others:
            raise ValueError(f"--model_args {', '.join(others)}: not of the model hpcrl; see docs/evaluation.md")
        asked = int(batch_size) if str(batch_size).isdigit() else 1
        self._generator = Generator(
            Path(path),
            dtype=dtype,
            max_length=max_length or inspect_model(Path(path)).max_positions or DEFAULT_LENGTH,
            max_num_seqs=max_num_seqs or (asked if asked > 1 else 16),
        )
        self.tokenizer = self._generator.tokenizer
        self.max_length, self._at_once = self._generator.max_length, AT_ONCE * (max_num_seqs or 16)
        self._add_bos_token, self._think_end, self._seed = add_bos_token, think_end_token, seed
        self._template_keys: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of sequence."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text without context: the tokenizer's beginning of sequence, or else its end."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text. Without `add_special_tokens`, special tokens are added as add_bos_token says, but not
        to a text that begins with them, as one made by a chat template."""
        chosen = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            chosen = False
        keys = {} if chosen is None else {"add_special_tokens": chosen}
        return list(self.tokenizer.encode(string, **keys))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as a text. Without `add_generation_prompt`, its last message is continued."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_keys,
            )
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of max_length."""
        windows, counts = [], []
        for request in requests:
            parts = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            of_text = [(None, *make_disjoint_window(part)) for part in parts]
            windows += of_text
            counts.append(len(of_text))
        values = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        sums = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _pair, context, continuation in requests:
            kept = self.max_length + 1 - len(continuation)  # the last token is predicted, and not an input
            rows.append(((context or [self.prefix_token_id])[-kept:] if kept > 0 else [], continuation))
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(rows), disable=disable_tqdm, desc="Log-likelihoods") as bar:
            for start in range(0, len(rows), self._at_once):
                found = self._generator.logprobs(rows[start : start + self._at_once])
                results += [(float(part.logprobs.sum(dtype="float64")), part.greedy) for part in found]
                bar.update(len(found))
        for (pair, _context, _continuation), result in zip(requests, results, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Responses to contexts, up to the first of the task's stop strings, without it."""
        end = self.tokenizer.decode(self.eot_token_id)
        texts: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Responses") as bar:
            for start in range(0, len(requests), self._at_once):
                part = requests[start : start + self._at_once]
                prepared = [self._request(start + i, *request.args) for i, request in enumerate(part)]
                outputs = self._generator.respond([request for request, _ in prepared])
                for request, (_, until), output in zip(part, prepared, outputs, strict=True):
                    text = self.tokenizer.decode(output.token_ids.tolist(), skip_special_tokens=True)
                    stops = handle_stop_sequences(until, eos=end)
                    texts.append(postprocess_generated_text(text, stops, self._think_end))
                    self.cache_hook.add_partial("generate_until", request.args, texts[-1])
                bar.update(len(part))
        return texts

    def _request(self, number: int, context: str, generation: dict[str, Any]) -> tuple[Request, list[str]]:
        """The engine's request, and the task's stop strings. Repeats of a context are sampled apart."""
        keys = normalize_gen_kwargs(generation, MAX_GEN_TOKENS)
        until, tokens = list(keys.pop("until")), keys.pop("max_gen_toks")
        sampled, temperature = keys.pop("do_sample"), float(keys.pop("temperature", 1.0))
        top_p, top_k, min_p = (keys.pop(key, default) for key, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0)))
        odd = [f"{key}={value}" for key, value in keys.items() if NEUTRAL.get(key) != value]
        if odd:
            raise ValueError(f"generation_kwargs {', '.join(odd)}: the model hpcrl can't do this; use --model hf")
        if tokens >= self.max_length:
            raise ValueError(f"max_gen_toks is {tokens}; it must be less than the model's {self.max_length} tokens")
        ids = self.tok_encode(context)[tokens - self.max_length :] or [self.prefix_token_id]
        # A stop string before the end of thinking is not one, so responses are cut afterwards.
        stop = () if self._think_end else tuple(text for text in until if text)
        params = SamplingParams(
            tokens,
            temperature if sampled else 0.0,
            float(top_p or 1.0),
            int(top_k or 0),
            float(min_p or 0),
            stop,
            (self.eot_token_id,),
        )
        return Request(number, ids, params, sampling_seed(self._seed, make_sample_id(number, 0, 0))), until
