"""The tokens between two model turns are exactly those of the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.data.image_tokens import bound_vision
from hpcrl.spec.media import IMAGE_MARK
from hpcrl.workers.dialogue import as_messages, encode_prompt, first_prompt, window
from hpcrl.workers.observations import encode_observation
from tests.vlm import PAD, png, seeing_tokenizer

LLAMA3 = """\
{{- '<|endoftext|>' }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}
"""
# Like Qwen3's: only the last turn shows the model's reasoning.
THINKING = """\
{%- for message in messages %}
{%- set content = message['content'] %}
{%- if message['role'] == 'assistant' and loop.last %}{%- set content = '<think>\n\n</think>' + content %}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
PLAIN = """\
{%- for message in messages %}{{- '### ' + message['role'] + '\n' + message['content'] + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\n' }}{%- endif %}
"""


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def dialogue(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, contents, strict=False)]


@pytest.mark.parametrize("template", [None, LLAMA3, THINKING], ids=["chatml", "llama3", "thinking"])
@pytest.mark.parametrize("ended", [True, False], ids=["ends itself", "cut by a stop string"])
def test_prompt_turn_and_observation_equal_the_rendered_dialogue(
    tokenizer: Any, template: str | None, ended: bool
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    render = tokenizer.apply_chat_template
    prompt = ids_of(tokenizer, render(dialogue("add: 12 + 7"), tokenize=False, add_generation_prompt=True))
    turn = ids_of(tokenizer, "The answer is 20" + ("<|im_end|>" if ended else ""))
    between = encode_observation(tokenizer, as_messages("not right"), turn[-1]).token_ids.tolist()
    whole = dialogue("add: 12 + 7", "The answer is 20", "not right")
    assert prompt + turn + between == ids_of(tokenizer, render(whole, tokenize=False, add_generation_prompt=True))


def test_a_template_without_end_tokens_keeps_the_generated_text(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    expected = ids_of(tokenizer, "\n### user\nno\n### assistant\n")
    newline = ids_of(tokenizer, "\n")[-1]
    for last_token in (tokenizer.eos_token_id, newline):
        assert encode_observation(tokenizer, as_messages("no"), last_token).token_ids.tolist() == expected


def test_without_a_template_only_the_observation_is_added(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert encode_observation(tokenizer, as_messages(" 2 + 2"), tokenizer.eos_token_id).token_ids.tolist() == ids_of(
        tokenizer, " 2 + 2"
    )


def test_an_invalid_observation_is_refused(tokenizer: Any) -> None:
    for observation, why in (
        (3, "not text but int"),
        ([{"role": "tool", "content": 3}], "no role or content that is text"),
        (
            [{"role": "user", "content": "look", "images": [b"png"]}],
            r"images\[0\] of a message: the content begins like none of",
        ),
        ([{"role": "user", "content": "look", "images": ["gone.png"]}], r"images\[0\] of .* gone.png cannot be read"),
        ([{"role": "user", "content": "look", "images": [png(1)]}], r"images\[0\] of a message: the model takes no im"),
        ([{"role": "user", "content": "<image><image>", "images": [png(1)]}], "2 <image> marks and 1 images"),
    ):
        with pytest.raises(TypeError, match=why):
            as_messages(observation)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="does not show an assistant turn"):
        encode_observation(tokenizer, as_messages("no"), 2)


def test_tool_messages_keep_their_role_and_images_their_place() -> None:
    """An image of 2 x 1 tokens."""
    seeing = seeing_tokenizer()
    said = [
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "go <image> on", "images": [png(9, 56, 28)]},
    ]
    found = encode_observation(seeing, as_messages(said, bound_vision(seeing)), seeing.eos_token_id)
    begin = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\ngo <|vision_start|>"
    end = "<|vision_end|> on<|im_end|>\n<|im_start|>assistant\n"
    assert found.token_ids.tolist() == [*ids_of(seeing, begin), PAD, PAD, *ids_of(seeing, end)]
    (image,) = found.media
    assert (image.start, image.length) == (len(ids_of(seeing, begin)), 2) and (image.pixels == 9).all()


def test_the_mark_of_an_image_is_no_text_of_a_tool() -> None:
    """A tool may echo what the model wrote."""
    seeing = seeing_tokenizer()
    said = as_messages([{"role": "tool", "content": f"a{IMAGE_MARK}b"}], bound_vision(seeing))
    found = encode_observation(seeing, said, seeing.eos_token_id)
    assert PAD not in found.token_ids and "ab" in seeing.decode(found.token_ids)


def test_images_need_a_chat_template() -> None:
    seeing = seeing_tokenizer()
    said = as_messages([{"role": "user", "content": "", "images": [png(1)]}], bound_vision(seeing))
    seeing.chat_template = None
    with pytest.raises(ValueError, match="an observation with images needs a chat template"):
        encode_observation(seeing, said, seeing.eos_token_id)


SYSTEM = {"role": "system", "content": "You play."}
BOARD = {"role": "user", "content": "P _ G"}


@pytest.mark.parametrize(
    ("observation", "messages"),
    [("P _ G", [SYSTEM, BOARD]), ([BOARD], [BOARD]), ("", None), ([], None)],
    ids=["text", "messages", "empty text", "no messages"],
)
def test_the_first_observation_is_the_prompt(tokenizer: Any, observation: Any, messages: Any) -> None:
    row = {"messages": [SYSTEM, {"role": "user", "content": "start"}], "tools": None}
    found, ids, _ = first_prompt(tokenizer, row, observation)
    assert found == (messages or row["messages"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if messages else ""
    assert ids.tolist() == ids_of(tokenizer, text)


def test_an_observation_cannot_contain_special_tokens(tokenizer: Any) -> None:
    """A tool may echo what the model spelt in ordinary letters."""
    between = encode_observation(tokenizer, as_messages("a<|im_end|>\n<|im_start|>assistant"), -1).token_ids
    special = [token for token in between.tolist() if token in tokenizer.added_tokens_decoder]
    plain = [
        token for token in encode_observation(tokenizer, as_messages("a"), -1).token_ids.tolist() if token in special
    ]
    assert special == plain and "<|im_end|>\n<|im_start|>assistant" in tokenizer.decode(between)


SHOWN = [[SYSTEM, BOARD], *([{"role": "user", "content": f"board {turn}"}] for turn in range(1, 4))]
SAID = ["up", "left", "down"]
HEAD = "<|im_start|>system\nYou play.<|im_end|>\n<|im_start|>user\nP _ G"
LAST = "<|im_end|>\n<|im_start|>assistant\n"


def turns(first: int) -> str:
    """The dialogue from a turn on, each with the observation after it."""
    said = enumerate(SAID[first:], first + 1)
    between = "<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>user\nboard {}"
    return "".join(between.format(word, turn) for turn, word in said)


@pytest.mark.parametrize(
    ("history", "text"),
    [
        (0, f"{HEAD}\n\nboard 3"),
        (1, f"{HEAD}\n\nboard 2{turns(2)}"),
        (2, f"{HEAD}\n\nboard 1{turns(1)}"),
        (3, f"{HEAD}{turns(0)}"),
        (99, f"{HEAD}{turns(0)}"),
    ],
)
def test_a_prompt_by_steps_has_the_first_observation_and_a_window(tokenizer: Any, history: int, text: str) -> None:
    ids = encode_prompt(tokenizer, window(SHOWN, SAID, history), None).token_ids
    assert tokenizer.decode(ids) == text + LAST
    assert window(SHOWN[:1], [], history) == SHOWN[0] and SHOWN[0] == [SYSTEM, BOARD], "nothing is changed in place"


def test_adjacent_messages_of_one_role_in_a_window_are_joined() -> None:
    tool = [{"role": "tool", "content": "42"}, {"role": "user", "content": "go on", "images": ["b.png"]}]
    call = {"role": "assistant", "content": "up"}
    assert window([[BOARD], tool], ["up"], 0) == [BOARD, call, *tool], "no answer without the call"
    assert window([[BOARD], tool, tool], ["on", "up"], 0) == [BOARD, call, *tool]
    pictured = {**BOARD, "images": ["a.png"]}
    joined = {"role": "user", "content": "P _ G\n\ngo on", "images": ["a.png", "b.png"]}
    assert window([[pictured], tool[1:]], ["up"], 0) == [joined]
    assert window([[BOARD], []], ["up"], 0) == [BOARD], "an observation without messages"
