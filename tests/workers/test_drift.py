"""Token drift: training must use the tokens that the generator read and wrote. Known cases of verl and slime, each
compared with the way that drifts; and templates from installed packages.

Mistral's templates are those of mistral-common, which generates what Mistral publishes; ChatML's is vLLM's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config import parse
from hpcrl.engines.gen.generation_engine import Output
from hpcrl.messaging.messages import EnvObservation, PromptPayload
from hpcrl.rollout.types import FinishReason
from hpcrl.workers.dialogue import first_prompt
from hpcrl.workers.held_samples import PromptState, SampleState
from hpcrl.workers.observations import encode_observation
from tests.workers.test_templates import ASKED, QWEN2_5, QWEN3, TOOL, results

USER = [{"role": "user", "content": "no"}]


@pytest.fixture
def make(model_folder: Path) -> Callable[..., Any]:
    """A tokenizer with this template and these special tokens."""
    from transformers import AutoTokenizer

    def made(template: str, *special: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
        return tokenizer

    return made


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered(tokenizer: Any, messages: list[dict[str, Any]], ask: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))


def episode(tokenizer: Any, turn: list[int], observation: list[dict[str, Any]]) -> SampleState:
    """What a generator rank holds after the first prompt, a turn of these tokens, and an observation."""
    messages, prompt, _ = first_prompt(tokenizer, {"messages": ASKED, "tools": None}, ASKED)
    config = parse({"env": {"default": {"name": "scripted"}}})
    meta = json.dumps({"messages": messages}).encode()
    sample = SampleState(1 << 24, PromptState(PromptPayload(1, "default", prompt.tobytes(), meta), config))
    count, fill = len(turn), np.zeros(len(turn), np.float32)
    output = Output(1 << 24, np.array(turn, np.int32), fill, np.zeros(count, np.int32), FinishReason.STOP)
    sample.end_turn(output, tokenizer.decode(turn))
    after = encode_observation(tokenizer, observation, turn[-1]).token_ids
    sample.observe(EnvObservation(1 << 24, after.tobytes(), json.dumps(observation).encode()))
    return sample


def test_a_turn_is_not_tokenised_again(make: Callable[..., Any]) -> None:
    """verl's RFC 6719, first pitfall: tokens that the model drew are not always those of their text."""
    tokenizer = make(QWEN2_5)
    [end] = ids_of(tokenizer, "<|im_end|>")
    letters = [token for letter in "answer" for token in ids_of(tokenizer, letter)]
    held = episode(tokenizer, [*letters, end], USER).held
    assert held.token_ids[held.loss_mask].tolist() == [*letters, end]
    assert held.turn_ids[held.loss_mask].tolist() == [0] * 7 and held.turn_ids[-1] == 0
    assert ids_of(tokenizer, tokenizer.decode(letters)) != letters, "the text has other tokens"


def test_the_line_break_after_a_turn_is_kept_outside_the_loss_mask(make: Callable[..., Any]) -> None:
    """verl's issues 3720 and 6501: generation stops at <|im_end|>, and the template continues with a line break."""
    tokenizer = make(QWEN2_5)
    turn = ids_of(tokenizer, "7<|im_end|>")
    held = episode(tokenizer, turn, USER).held
    whole = [*ASKED, {"role": "assistant", "content": "7"}, *USER]
    assert held.token_ids.tolist() == ids_of(tokenizer, rendered(tokenizer, whole))
    after = np.flatnonzero(held.loss_mask)[-1] + 1
    assert tokenizer.decode(held.token_ids[after : after + 1]) == "\n"
    alone = rendered(tokenizer, USER)
    assert not alone.startswith("\n"), "the new messages alone lack it"


def test_the_default_system_prompt_is_not_inserted_again(make: Callable[..., Any]) -> None:
    """verl's issue 6501: new messages rendered separately get the template's default system prompt."""
    tokenizer = make(QWEN2_5)
    assert "system" in rendered(tokenizer, USER)
    between = tokenizer.decode(
        encode_observation(tokenizer, USER, tokenizer.convert_tokens_to_ids("<|im_end|>")).token_ids
    )
    assert "system" not in between


@pytest.mark.parametrize("observation", [USER, results("7")], ids=["user", "tool"])
def test_a_template_that_drops_reasoning_changes_no_earlier_token(
    make: Callable[..., Any], observation: list[dict[str, Any]]
) -> None:
    """verl's documentation of multi-turn rollouts (QwQ, Qwen3): the difference of two renderings is not a turn if the
    longer one lacks the shorter one's reasoning."""
    tokenizer = make(QWEN3)
    said = "<think>\nHm.\n</think>\n\n15"
    turn = [*ASKED, {"role": "assistant", "content": said}]
    held = episode(tokenizer, ids_of(tokenizer, f"{said}<|im_end|>"), observation).held
    text = tokenizer.decode(held.token_ids)
    assert text.startswith(rendered(tokenizer, turn, ask=False).removesuffix("\n"))
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    if observation is USER:
        assert not rendered(tokenizer, [*turn, *observation]).startswith(rendered(tokenizer, turn, ask=False))


def test_results_of_parallel_calls_are_in_one_turn(make: Callable[..., Any]) -> None:
    """slime's issue 2263: each result rendered separately becomes its own user turn."""
    tokenizer = make(QWEN3)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    both = tokenizer.decode(encode_observation(tokenizer, results("7", "8"), end, [TOOL]).token_ids)
    assert both.count("<|im_start|>user") == 1 and both.count("<tool_response>") == 2
    alone = [tokenizer.decode(encode_observation(tokenizer, [one], end, [TOOL]).token_ids) for one in results("7", "8")]
    assert "".join(alone).count("<|im_start|>user") == 2


def mistral(version: str, spaces: bool = False) -> str:
    """The template of Mistral's tokenizers of this version; spaces: those of SentencePiece."""
    templates = pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    efforts = (("none", "high"), "none") if version == "v15" else (None, None)
    no = dict.fromkeys(("image_support", "audio_support", "thinking_support", "plain_thinking_support"), False)
    no |= {"use_special_token_variables": False}
    keys = {"default_system_prompt": None, "model_settings_fields": None}
    keys |= dict(zip(("reasoning_effort_values", "reasoning_effort_default"), efforts, strict=True))
    return str(templates.generate_chat_template(spaces, TokenizerVersion(version), **no, **keys))


def results_of(version: str, space: str) -> str:
    ids = [f"call0010{n}" for n in (7, 8)]
    if version == "v3":
        told = [f'{space}{{"content": {n[-1]}, "call_id": "{n}"}}' for n in ids]
    elif version in ("v7", "v11"):
        told = [f"{space}{n}[TOOL_CONTENT]{space}{n[-1]}" for n in ids]
    else:
        told = [n[-1] for n in ids]
    return "".join(f"[TOOL_RESULTS]{one}[/TOOL_RESULTS]" for one in told)


@pytest.mark.parametrize(
    ("version", "spaces"),
    [("v3", True), ("v3", False), ("v7", True), ("v7", False), ("v11", False), ("v13", False), ("v15", False)],
)
def test_mistrals_templates_cause_no_drift(make: Callable[..., Any], version: str, spaces: bool) -> None:
    template = mistral(version, spaces)
    from mistral_common.tokens.tokenizers.base import SpecialTokens

    tokenizer = make(template, *(token.value for token in SpecialTokens))
    space, turn = " " if spaces else "", ids_of(tokenizer, "15</s>")
    held = episode(tokenizer, turn, USER).held
    whole = [*ASKED, {"role": "assistant", "content": "15"}, *USER]
    text = rendered(tokenizer, whole).replace("[/INST] 15", "[/INST]15")  # a space of the template before the turn
    assert tokenizer.decode(held.token_ids) == text and held.token_ids.tolist() == ids_of(tokenizer, text)
    between = encode_observation(tokenizer, results("7", "8"), turn[-1], [TOOL]).token_ids
    assert tokenizer.decode(between) == results_of(version, space)
    cut = encode_observation(tokenizer, USER, ids_of(tokenizer, "1")[0]).token_ids
    assert tokenizer.decode(cut) == f"</s>[INST]{space}no[/INST]"


def test_vllms_chatml_template_causes_no_drift(make: Callable[..., Any]) -> None:
    found = importlib.util.find_spec("vllm")  # not imported, which takes long
    if found is None or found.origin is None:
        pytest.skip("no vllm; make setup")
    template = Path(found.origin).parent / "transformers_utils" / "chat_templates" / "template_chatml.jinja"
    tokenizer = make(template.read_text())
    held = episode(tokenizer, ids_of(tokenizer, "15<|im_end|>"), USER).held
    whole = [*ASKED, {"role": "assistant", "content": "15"}, *USER]
    assert held.token_ids.tolist() == ids_of(tokenizer, rendered(tokenizer, whole))
