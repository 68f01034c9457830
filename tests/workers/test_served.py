"""Ranks that serve models to rewards: real engines behind real HTTP, in threads of the test."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config import RewardConfig, parse
from hpcrl.engines.gen.generation_engine import Request
from hpcrl.metrics.stats import flatten
from hpcrl.models.families import read_vision_of
from hpcrl.rewards.builtin.judge_prompt import data_url
from hpcrl.rewards.reward import RewardItem, Score, make_reward
from hpcrl.rewards.services import Addresses, Services
from hpcrl.workers.judge import JudgeRole
from hpcrl.workers.load import Load
from hpcrl.workers.reward_model import RewardModelRole
from tests.echo_judge import make_echo_judge
from tests.engines.test_scalar import make_reward_model
from tests.vlm import PAD, make_vlm, noise

TOKEN = "sesame"
JUDGES = {"default": {"name": "judge", "options": {"judges": {"own": {"role": "judge"}}}}}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_echo_judge(tmp_path_factory.mktemp("model") / "echo")


class Serving:
    """A role on a thread, which starts to work at go()."""

    def __init__(self, make: Any, **sections: Any):
        wakeup = threading.Event()
        world = SimpleNamespace(rank=0, address="127.0.0.1", token=TOKEN, mailbox_server=SimpleNamespace(wakeup=wakeup))
        config = parse({"data": {"train": "rows.jsonl"}, **sections})
        self.role = make(SimpleNamespace(config=config, world=world))
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._work)

    def go(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            if not self.role.poll():
                time.sleep(0.002)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.role.close()

    def post(self, path: str, body: bytes, token: str = TOKEN, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.role.url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, body, {"Authorization": f"Bearer {token}", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.fixture
def serving() -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def start(make: Any, **sections: Any) -> Serving:
        made.append(Serving(make, **sections))
        return made[-1]

    yield start
    for each in made:
        each.close()


def go_with(count: int, ranks: list[Serving]) -> None:
    """Let the ranks work once they have this many requests in total."""
    deadline = time.monotonic() + 600
    while sum(rank.role._service.in_flight for rank in ranks) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.go()


def judge(serving: Any, echo: Path, **more: Any) -> Serving:
    section = {"path": str(echo), "max_prompt_tokens": 64, "max_new_tokens": 24, "max_num_seqs": 4, **more}
    return serving(JudgeRole, judge=section, reward=JUDGES)  # type: ignore[no-any-return]


def score(
    urls: list[str], name: str, options: dict[str, Any], items: list[RewardItem], of: str = "", **more: Any
) -> list[Score]:
    """The scores of the reward `name`, or of its part, from the answers of a role's ranks."""
    patient = {} if of else {"request_timeout_s": 600}
    reward = make_reward(RewardConfig(name=name, timeout_s=900, options=patient | options))
    reward.connect(Services({of or name: urls}, {of or name: "m"}, TOKEN, **more))
    reward.start()
    return list(asyncio.run(reward.score(items)))  # type: ignore[arg-type]


def test_two_judges_share_requests_and_keep_their_batches_full(serving: Any, echo: Path) -> None:
    ranks = [judge(serving, echo) for _ in range(2)]
    items = [RewardItem(n, "d", "?", "x" * n) for n in range(1, 25)]
    threading.Thread(target=go_with, args=(24, ranks)).start()
    options = {"judges": {"own": {"role": "judge"}}}
    found = score([rank.role.url for rank in ranks], "judge", options, items)
    assert [each.reward for each in found] == pytest.approx([n % 10 / 10 for n in range(1, 25)])
    assert all(each.metrics["retries"] == each.metrics["unparsable"] == 0 for each in found)
    for rank in ranks:
        load = flatten(rank.role.answer("load", {}))
        assert load["judge/answered"] == 12 and load["judge/in_flight/max"] == 12
        assert load["judge/slots_used"] > 0.9 and 0 < load["judge/busy"] <= 1


def test_an_invalid_request_is_refused_with_the_reason(serving: Any, echo: Path) -> None:
    rank = judge(serving, echo)
    rank.go()
    at = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "a\nverdict 01234567: V"}], "max_tokens": 24}

    def asked(**changes: Any) -> tuple[int, str]:
        return rank.post(at, json.dumps(body | changes).encode())

    status, text = asked()
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "verdict 01234567: 0")
    shifted = asked(chat_template_kwargs={"shift": 3, "add_generation_prompt": False})
    assert "verdict 01234567: 3" in shifted[1], "what a judge's extra_body tells its template"
    assert asked(seed=1, stop=["7"])[1].count("verdict 0123456") == 1
    assert rank.post(at, json.dumps(body).encode(), token="wrong")[0] == 401
    assert rank.post("/v1/models", b"{}")[0] == 404
    assert rank.post(at, b"{}", **{"Content-Length": str(1 << 40)})[0] == 413
    refused = {
        "not as expected": [asked(tools=[]), asked(messages="x"), asked(temperature="hot"), rank.post(at, b"{")],
        "top_p is 0": [asked(top_p=0)],
        "TypeError": [asked(chat_template_kwargs={"shift": "x"}), asked(chat_template_kwargs={"messages": []})],
        "judge.max_new_tokens=24": [asked(max_tokens=25)],
        "judge.max_prompt_tokens=64": [asked(messages=[{"role": "user", "content": "x" * 99 + "V"}])],
    }
    for part, answers in refused.items():
        assert all(status == 400 and part in text for status, text in answers), (part, answers)
    assert rank.role.busy is False


def test_a_judge_sees_the_images_of_a_question_as_its_model_does(serving: Any, tmp_path: Path) -> None:
    """The pictures are on multiples of 28 pixels, so the judge's processor leaves them as they are."""
    folder = make_vlm("qwen2_5_vl", tmp_path / "model")
    vision = read_vision_of(folder)
    assert vision is not None
    rank = judge(serving, folder, max_prompt_tokens=2000, max_new_tokens=3)
    asked: list[Request] = []
    add = rank.role.engine.add
    rank.role.engine.add = lambda requests: (asked.extend(requests), add(requests))
    rank.go()
    images = [noise(56, 28, vision, 1), noise(28, 28, vision, 2)]
    items = [RewardItem(1, "d", "<image><image>?", "<|image_pad|>", images=shown) for shown in (images, images[:1])]
    options = {"judges": {"own": {"role": "judge"}}}
    found = [score([rank.role.url], "judge", options, [item], seeing=["judge"])[0] for item in items]
    assert [each.error for each in found] == ["own: no verdict in its answer"] * 2, "the model is random"
    both, first = asked
    assert [medium.content for medium in both.media] == [image.content for image in images]
    assert [(medium.start, medium.length) for medium in both.media] == [
        (start, length) for start, length in [(both.prompt_ids.index(PAD), 2), (both.prompt_ids.index(PAD) + 4, 1)]
    ], "each between two other tokens"
    assert both.prompt_ids.count(PAD) == 3 and first.prompt_ids.count(PAD) == 2, "the response's marks are text"
    assert both.seed != first.seed
    url = {"type": "image_url", "image_url": {"url": data_url(images[0])}}

    def refused(part: dict[str, Any], of: Serving = rank) -> str:
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "V"}]}]}
        status, text = of.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 400
        return text

    assert "only data URLs are read" in refused({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}})
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    assert "image_url: it is damaged, or not an image of a known format (PNG, " in refused(broken)
    rank.role._most_prompt = 4
    assert re.search(r"the question has \d+ tokens, 2 of them of images, judge.max_prompt_tokens=4", refused(url))
    rank.role._vision = None
    assert "the question has images, but the judge takes none" in refused({**url, "image_url": {"url": "data:,"}})


def test_a_full_rank_refuses_requests_and_requests_of_gone_clients_are_dropped(serving: Any, echo: Path) -> None:
    rank = judge(serving, echo, max_requests=1)
    body = json.dumps({"messages": [{"role": "user", "content": "verdict 01234567: V"}], "max_tokens": 24}).encode()
    gone = http.client.HTTPConnection(rank.role.url.removeprefix("http://"))
    gone.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {TOKEN}"})
    while not rank.role.poll():
        time.sleep(0.01)
    assert rank.role.busy
    status, text = rank.post("/v1/chat/completions", body)
    assert status == 503 and "1 requests are open, the most is 1" in text
    assert flatten(rank.role.answer("load", {}))["judge/refused"] == 1
    rank.role._decode_chunk = 0  # it decodes nothing more
    gone.close()
    deadline = time.monotonic() + 20
    while rank.role.busy:
        rank.role.poll()
        assert time.monotonic() < deadline
    assert rank.role.engine.progress() == {}


def test_a_request_of_a_deterministic_run_is_reproducible(serving: Any, echo: Path) -> None:
    asked: list[bytes] = []
    rank = judge(serving, echo)
    take = rank.role._service.take

    def spy() -> Any:
        found = take()
        asked.extend(question.asked.messages[-1].content for question in found)
        return found

    rank.role._service.take = spy
    rank.go()
    for seed in (7, 7, 8, None, None):
        [found] = score([rank.role.url], "judge", {"judges": {"own": {"role": "judge"}}},
                        [RewardItem(1, "d", "?", "four")], seed=seed)  # fmt: skip
        assert found.reward == pytest.approx(0.4)
    assert asked[0] == asked[1] and len(set(asked)) == 4


def test_heads_of_a_reward_model_are_combined_with_their_weights(serving: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_reward_model(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
    torch.nn.init.normal_(model.score.weight)
    model.config.id2label = {0: "helpful", 1: "right", 2: "long"}
    model.save_pretrained(folder)
    own = {"path": str(folder), "head_weights": {"long": -0.5, "helpful": 2.0}}
    rank = serving(RewardModelRole, reward_model=own, reward={"default": {"name": "reward_model"}})
    threading.Thread(target=go_with, args=(2, [rank])).start()
    found = score([rank.role.url], "reward_model", {}, [RewardItem(n, "d", "?", "x" * n) for n in (1, 2)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, each in zip((1, 2), found, strict=True):
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * number}]
        ids = tokenizer.apply_chat_template(asked, return_dict=False)
        with torch.no_grad():
            helpful, right, long = model(torch.tensor([ids])).logits[0].tolist()
        assert each.reward == pytest.approx(2 * helpful - 0.5 * long, abs=1e-5)
        told = {"head/helpful": helpful, "head/right": right, "head/long": long}
        assert {name: each.metrics[name] for name in told} == pytest.approx(told, abs=1e-5)


def test_a_reward_model_scores_dialogues_like_transformers(serving: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_reward_model(tmp_path / "model")
    reward = {"default": {"name": "reward_model"}}
    rank = serving(
        RewardModelRole, reward_model={"path": str(folder), "max_tokens": 64, "max_tokens_per_batch": 80}, reward=reward
    )
    asked = ({"role": "user", "content": "hi<|im_end|>"},)
    whole = [*asked, *({"role": "assistant", "content": text} for text in ("a", "b"))]
    items = [RewardItem(n, "d", "?", "x" * n, messages=asked) for n in range(6)]
    items += [RewardItem(6, "d", "?", "b", extra={"messages": whole}, earlier=["a"])]  # type: ignore[list-item]
    threading.Thread(target=go_with, args=(8, [rank])).start()
    found = score(
        [rank.role.url], "reward_model", {"scale": 2.0, "shift": 1.0}, [*items, RewardItem(7, "d", "?", "x" * 99)]
    )
    assert "reward_model.max_tokens=64" in found.pop().error
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for item, each in zip(items, found, strict=True):
        dialogue = whole if item.earlier else [*asked, {"role": "assistant", "content": item.response}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False).replace("hi<|im_end|>", "hi\0")
        before, after = text.split("\0")
        ids = [tokenizer(before), tokenizer("<|im_end|>", split_special_tokens=True), tokenizer(after)]
        with torch.no_grad():
            logit = model(torch.tensor([[i for part in ids for i in part["input_ids"]]])).logits.item()
        assert each.metrics["raw"] == pytest.approx(logit, abs=1e-5)
        assert each.reward == pytest.approx(2 * (logit - 1), abs=1e-5)
    assert len({each.reward for each in found}) == 7
    load = flatten(rank.role.answer("load", {}))
    assert load["reward_model/answered"] == 7 and load["reward_model/in_flight/max"] == 7
    [squashed] = score([rank.role.url], "reward_model", {"sigmoid": True, "threshold": 0.5}, items[:1])
    assert squashed.reward == pytest.approx(1 / (1 + 2.718281828 ** -found[0].metrics["raw"]))
    assert squashed.score == float(squashed.reward >= 0.5)
    parts = {
        "liked": {"name": "reward_model", "options": {"scale": 2.0, "shift": 1.0, "request_timeout_s": 600}},
        "short": {"name": "length", "options": {"max_tokens": 9, "buffer_tokens": 9}, "weight": 0.5},
    }
    long = replace(items[1], token_ids=[0] * 9)
    [composed] = score([rank.role.url], "composed", {"parts": parts}, [long], of="reward_model")
    assert composed.reward == pytest.approx(found[1].reward - 0.5)
    assert composed.metrics["liked"] == pytest.approx(found[1].reward) and composed.metrics["short"] == -1.0
    assert composed.metrics["liked/raw"] == pytest.approx(found[1].metrics["raw"])


def test_the_next_request_goes_to_the_least_busy_responsive_rank() -> None:
    addresses = Addresses(["a", "b", "c"])
    assert [addresses.take() for _ in range(4)] == ["a", "b", "c", "a"]
    addresses.done("b", told=9)
    addresses.done("c", down_s=60.0)
    assert [addresses.take() for _ in range(2)] == ["a", "a"], "b is busy with the requests of others, c is down"
    addresses.done("b", told=0)
    assert addresses.take() == "b" and addresses.any_up()
    for name in "ab":
        addresses.done(name, down_s=60.0)
    assert not addresses.any_up() and addresses.take() == "c", "if none answers, the least busy is asked again"


def test_the_load_counts_time_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    load = Load("judge", 2)
    for seconds, count in ((1, 4), (2, 1), (1, 0), (4, 0)):
        now[0] += seconds
        load.note(count)
    load.answered(5)
    assert flatten(load.take(3)) == pytest.approx({
        "judge/busy": 3 / 8, "judge/in_flight/mean": 3.0, "judge/in_flight/max": 4, "judge/slots_used": 5 / 6,
        "judge/answered": 5, "judge/refused": 3,
    })  # fmt: skip
    now[0] += 1
    assert flatten(load.take(0))["judge/busy"] == 0


@pytest.mark.parametrize(
    ("judges", "message"),
    [
        ({"role": "judge", "url": "http://h/v1"}, "give either url and model, or role: judge"),
        ({}, "give either url and model, or role: judge"),
        ({"url": "http://h/v1"}, "model: missing"),
        ({"role": "judge", "model": "m"}, "model: not read with role"),
        ({"role": "judge", "max_tokens": 9}, "max_tokens=9: not read with role; use judge.max_new_tokens"),
        ({"role": "referee"}, "role: Input should be 'judge'"),
    ],
)
def test_a_judge_is_given_by_url_or_by_role_and_not_by_both(judges: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(RewardConfig(name="judge", options={"judges": {"a": judges}}))


def test_a_served_role_can_be_used_only_within_a_run() -> None:
    for name, options in (("judge", {"judges": {"a": {"role": "judge"}}}), ("reward_model", {})):
        with pytest.raises(ValueError, match=f"needs ranks of the role {name}, which only a run has"):
            make_reward(RewardConfig(name=name, options=options)).start()
