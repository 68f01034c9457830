"""The judge role: a frozen model on a rank of the run, which answers requests of reward workers.

Its engine decodes between the controller's commands. Requests join the running batch between two decode chunks, so the
batch stays full while there are more requests than slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpcrl.data.chat import bind, end_ids, render
from hpcrl.data.image_tokens import encode_with_images
from hpcrl.data.media import read_images, read_parts
from hpcrl.data.messages import ImagePart
from hpcrl.data.reasoning import TAIL_TOKENS, TurnTexts
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.engines.gen.generation_engine import GenEngine, Output, ReplicaRanks, Request, SamplingParams
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.metrics.stats import Stats
from hpcrl.models.families import read_vision_of
from hpcrl.rewards.seeing import why_judge_sees_nothing
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import IMAGE_MARK, MAX_PIXEL_BYTES, Medium
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.system.sized_cache import SizedCache
from hpcrl.workers.load import Load
from hpcrl.workers.role import Rank
from hpcrl.workers.serving import MAX_BYTES, Question, Service

PATH = "/v1/chat/completions"
MAX_IMAGE_BYTES = 3 * MAX_PIXEL_BYTES // 2
"""Maximum size of a request's images in base64, as PNG files that are not smaller than their pixels."""
KEPT_BYTES = 32 << 20
"""Size of decoded images kept for further questions; the responses of a group have the same images."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text in a message's content."""

    text: str


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """An image file as a data URL. `detail` is ignored."""

    url: str
    detail: str = "auto"


class ImageUrlPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image in a message's content."""

    image_url: ImageUrl


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message in a request."""

    role: str
    content: str | list[TextPart | ImageUrlPart]


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The subset of OpenAI's chat completions request that a judge supports. `model` is ignored: the judge has one."""

    messages: list[ChatMessage]
    model: str = ""
    temperature: float = 0.0
    max_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] = []
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] = {}


class JudgeRole:
    """A replica of the judge on one rank. The answer depends only on the question if it is greedy, or sampled without a
    seed in the request."""

    def __init__(self, worker: Rank):
        from transformers import AutoTokenizer

        config, rank = worker.config.of_judge(), worker.world.rank
        assert config.model.path is not None, "checked before the start"
        path = Path(config.model.path)
        self._vision = None if why_judge_sees_nothing(worker.config) else read_vision_of(path)
        self._tokenizer = bind(AutoTokenizer.from_pretrained(path), {}, self._vision)
        self._images = SizedCache[tuple[Medium, ...]](
            KEPT_BYTES, lambda seen: sum(len(medium.content) for medium in seen)
        )
        _check_template(self._tokenizer, path)
        self._end_ids = end_ids(self._tokenizer)
        make = GEN_ENGINES[config.gen_engine].load()
        self.engine: GenEngine = make(config, path, self._tokenizer, ReplicaRanks((rank,)))
        self.engine.load_weights(read_safetensors(path), version=0)
        self._decode_chunk, self._most_prompt = config.generator.decode_chunk_tokens, config.data.max_prompt_tokens
        self._most_new = config.rollout.max_new_tokens
        self._questions: dict[int, Question] = {}  # by request
        self._texts = TurnTexts(self._tokenizer)
        self._prompts: dict[int, list[int]] = {}  # by request: the prompt's last tokens
        self._num_asked = 0
        self._load = Load("judge", self.engine.max_num_seqs)
        world = worker.world
        most = config.generator.most_requests
        wake, max_bytes = world.mailbox_server.wakeup.set, MAX_BYTES + (MAX_IMAGE_BYTES if self._vision else 0)
        self._service = Service(world.address, world.token, {PATH: ChatRequest}, most, wake, max_bytes)
        self.url = self._service.url

    @property
    def busy(self) -> bool:
        return bool(self._questions)

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {}

    def poll(self) -> bool:
        arrived = self._service.take()
        for question in arrived:
            self._admit(question)
        if gone := [i for i, question in self._questions.items() if question.gone]:
            self.engine.abort(gone)
            for request in gone:
                del self._questions[request], self._prompts[request]
        self._load.note(len(self._questions))
        if not self._questions:
            return bool(arrived)
        with torch.no_grad():
            outputs = self.engine.step(self._decode_chunk)
        self._load.answered(len(outputs))
        for output in outputs:
            question = self._questions.pop(output.id)
            [text] = self._texts.of([output.token_ids.tolist()], [self._prompts.pop(output.id)])
            question.answer(_completion(output, text))
        return True

    def answer(self, question: str, values: dict[str, Any]) -> Stats:
        """The load since the last call (see Answers)."""
        return self._load.take(self._service.take_refused())

    def close(self) -> None:
        self._service.close()
        self.engine.close()

    def _admit(self, question: Question) -> None:
        asked: ChatRequest = question.asked
        try:
            messages, images = self._with_marks(asked.messages)
            text = render(self._tokenizer, messages, None, **asked.chat_template_kwargs)
            ids, media = encode_with_images(self._tokenizer, text, images)
            if len(ids) > self._most_prompt:
                of_images = f", {sum(image.length for image in media)} of them of images" if media else ""
                limit = f"judge.max_prompt_tokens={self._most_prompt}"
                raise ValueError(f"the question has {len(ids)} tokens{of_images}, {limit}")
            max_tokens = self._most_new if asked.max_tokens is None else asked.max_tokens
            if max_tokens > self._most_new:
                raise ValueError(f"max_tokens is {max_tokens}, judge.max_new_tokens={self._most_new}")
            limits = asked.top_p, asked.top_k, asked.min_p, tuple(asked.stop)
            params = SamplingParams(max_tokens, asked.temperature, *limits, stop_token_ids=self._end_ids)
            seed = asked.seed if asked.seed is not None else _seed_of(ids, media)
            self.engine.add([Request(self._num_asked, ids, params, seed, media=media)])
        except Exception as error:  # from a template, which runs code of the model's folder, or from the engine
            question.refuse(f"{type(error).__name__}: {error}")
            return
        self._questions[self._num_asked], self._prompts[self._num_asked] = question, ids[-TAIL_TOKENS:]
        self._num_asked += 1

    def _with_marks(self, asked: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], list[Medium]]:
        """Messages with an IMAGE_MARK for each image, and the images. ValueError if one cannot be read."""
        messages: list[dict[str, Any]] = []
        images: list[Medium] = []
        for message in asked:
            content = ""
            for part in [TextPart(message.content)] if isinstance(message.content, str) else message.content:
                if isinstance(part, TextPart):
                    content += part.text.replace(IMAGE_MARK, "")
                else:
                    content += IMAGE_MARK
                    images += self._image(part.image_url.url)
            messages.append({"role": message.role, "content": content})
        return messages, images

    def _image(self, url: str) -> tuple[Medium, ...]:
        """_read_image(), with recently read images kept."""
        return self._images.get(hashlib.sha256(url.encode()).digest(), lambda: self._read_image(url))

    def _read_image(self, url: str) -> tuple[Medium, ...]:
        """The image of a data URL as the judge's model sees it. ValueError if it cannot be read."""
        if self._vision is None:
            raise ValueError("the question has images, but the judge takes none")
        if not url.startswith("data:"):
            raise ValueError("image_url: only data URLs are read")
        return read_images(read_parts([ImagePart(url, "image_url")], Path()), self._vision)


def _completion(output: Output, text: str) -> dict[str, Any]:
    reason = "length" if output.finish_reason == FinishReason.LENGTH else "stop"
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": len(output.token_ids)}}


def _seed_of(ids: list[int], media: Sequence[Medium]) -> int:
    """A seed that depends only on the question, so equal questions get equal answers."""
    content = str(ids).encode() + b"".join(medium.digest for medium in media)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def _check_template(tokenizer: Any, path: Path) -> None:
    """ValueError if the chat template refuses a judge's messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"judge.path: the tokenizer of {path} has no chat template")
    try:
        render(tokenizer, [{"role": role, "content": "?"} for role in ("system", "user")], None)
    except TemplateRefusal as error:
        text = f"refuses a system and a user message: {error.reason}"
        raise ValueError(f"judge.path: the chat template of {path} {text}") from error
