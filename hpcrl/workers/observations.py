"""The tokens between two model turns: the chat template's text after a turn and around an observation.

The model's own text is never rendered again. A turn that calls tools is rendered with placeholders for the calls, since
the text after the turn depends only on the calls' names and ids.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np

from hpcrl.data.chat import render, special_tokens
from hpcrl.data.image_tokens import encode_with_images
from hpcrl.data.messages import Messages
from hpcrl.data.template_forms import TemplateRefusal, Tools, shows_results
from hpcrl.workers.dialogue import Encoded, images_of, without_images

CONTENT = "0CONTENT{}0"
"""Placeholder for the end of the model's text; letters and digits, which no template trims or escapes."""


def encode_observation(tokenizer: Any, observation: Messages, last_token: int, tools: Tools | None = None) -> Encoded:
    """The tokens after a model turn that ends with `last_token`, up to the start of the next model turn.

    This is the chat template's text after the turn and around the observation. The end-of-turn token is left out if the
    model has written it or another special token instead (Llama 3.1 ends a tool call with <|eom_id|>). Without a chat
    template, only the messages' contents. ValueError if the template refuses the messages or renders no model turn.
    """
    seen, observation = observation, without_images(observation)
    if not getattr(tokenizer, "chat_template", None):
        if images_of(seen):
            raise ValueError("an observation with images needs a chat template, and the tokenizer has none")
        text = render(tokenizer, observation, None)
        return Encoded(seen, np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32))
    mark = _unused(observation)
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", observation))
    calls = [_call(result, number, tools, mark) for number, result in enumerate(results)]
    called = bool(results) and shows_results(tokenizer, results, called=True)
    turn = (
        {"role": "assistant", "content": None, "tool_calls": calls}
        if called
        else {"role": "assistant", "content": mark}
    )
    following = _after(tokenizer, [turn, *observation], tools, mark, ask=True)
    alone = _after(tokenizer, [turn], tools, mark, ask=False)
    begins = _begin(tokenizer, alone, following, last_token, called)
    token_ids, media = encode_with_images(tokenizer, following[begins:], images_of(seen))
    return Encoded(seen, np.array(token_ids, dtype=np.int32), media)


def check_continues(tokenizer: Any) -> None:
    """ValueError if the chat template cannot continue a dialogue after a model turn, as every episode requires."""
    if not getattr(tokenizer, "chat_template", None):
        return
    mark = CONTENT.format("")
    try:
        _after(
            tokenizer, [{"role": "assistant", "content": mark}, {"role": "user", "content": "0"}], None, mark, ask=True
        )
    except TemplateRefusal as error:
        raise ValueError(
            f"model.path: environments need a chat template that continues a dialogue: {error.reason}"
        ) from error


def _call(result: dict[str, Any], number: int, tools: Tools | None, mark: str) -> dict[str, Any]:
    name = result.get("name") or "f"
    functions = [tool.get("function", tool) for tool in tools or []]
    parameters: Any = next((f.get("parameters") for f in functions if f.get("name") == name), None)
    argument = next(iter((parameters or {}).get("properties") or {}), "x")
    function = {"name": name, "arguments": {argument: mark}}
    return {"type": "function", "id": result.get("tool_call_id") or f"call{number:05d}", "function": function}


def _unused(messages: Messages) -> str:
    """A mark that none of the messages contains."""
    text = json.dumps(messages)
    return next(mark for n in itertools.count() if (mark := CONTENT.format(n or "")) not in text)


def _after(tokenizer: Any, messages: Messages, tools: Tools | None, mark: str, ask: bool) -> str:
    """The rendered text after the mark. TemplateRefusal if the template does not render the mark."""
    _, found, following = render(tokenizer, [{"role": "user", "content": "0"}, *messages], tools, ask).rpartition(mark)
    if not found:
        raise TemplateRefusal("it does not show an assistant turn that an observation follows")
    return following


def _begin(tokenizer: Any, alone: str, following: str, last_token: int, called: bool) -> int:
    """Index in `following` after the text that the model has written. `alone` is the text after the mark if no
    observation follows. `called` means tool calls, whose end (such as brackets) the model has also written."""
    special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or r"(?!)")
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, following, strict=False))
    shared = sum(1 for _ in same)  # length of the text that belongs to the turn
    if called and not special.search(following[:shared]):
        shared = max(shared, _end_of_rewritten(alone, following))
    added = tokenizer.added_tokens_decoder.get(last_token)
    # Instead, the next message's first token may end the turn (GLM's <|observation|>).
    if added is not None and (at := following.find(added.content)) >= 0 and not following[shared:at].strip():
        return at + len(added.content)
    ends = [found.span() for found in special.finditer(following) if found.end() <= shared]
    if not ends and special.match(alone) and (found := special.match(following)):
        ends = [found.span()]  # gpt-oss: <|return|> after the last turn, <|end|> after other turns
    if ends:
        start, end = ends[-1 if called else 0]  # tool calls may contain special tokens before the turn's end
        # Only an added token ends a turn. A newline by the model is content, even if the template adds another one.
        return end if added is not None and added.special else start
    return len(following[:shared].rstrip()) if called else 0


def _end_of_rewritten(alone: str, following: str) -> int:
    """The end of a turn whose calls the template renders differently if messages follow, as Apriel's adds call ids; 0
    if it is not found."""
    for start in range(len(alone)):
        if (at := following.find(alone[start:])) >= 0:
            return at + len(alone) - start
    return 0
