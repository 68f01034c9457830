"""The teacher behind an endpoint: equal to the same model in a folder, and every wrong server is refused in one line
before anything is generated."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, TinyModel, parse
from hpcrl.config.teacher_endpoint import TeacherEndpoint
from hpcrl.controller.teacher_client import widths_of
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging.messages import Done, Teach
from hpcrl.metrics.stats import flatten
from hpcrl.rewards.serving.endpoint import EndpointError
from hpcrl.rollout.batch import Batch
from hpcrl.workers.endpoint_answers import Told, read_completion, read_echo, read_generated
from hpcrl.workers.endpoint_probe import compared_ids, probe
from hpcrl.workers.prompt_logprobs import PromptLogprobs
from hpcrl.workers.rank_loop import Worker
from hpcrl.workers.teacher import UNKNOWN, TeacherRole
from hpcrl.workers.teacher_endpoint import make_teacher
from tests.dist.conftest import Threads
from tests.engines.worlds import by_steps, make_batch
from tests.teacher_server import Change, TeacherServer
from tests.workers.conftest import LAYOUT
from tests.workers.goldens.vllm_answers import GOLDEN, write_model

EPOCHS = itertools.count(1000)
SIZES: dict[str, Any] = {"hidden_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
KEY = "TEACHER_KEY"
LOGPROBS = 1e-5
"""Two computations of the same model in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    make_tiny_model(TinyModel(**SIZES, initializer_range=0.3, seed=5, vocab_size=330), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TeacherServer]:
    monkeypatch.setenv(KEY, "sesame")
    server = TeacherServer(folder)
    yield server
    server.close()


@pytest.fixture
def make(threads: Threads, model_folder: Path) -> Iterator[Callable[[dict[str, Any]], TeacherRole]]:
    def made(teacher: dict[str, Any]) -> TeacherRole:
        if dist.is_initialized():
            dist.destroy_process_group()
        settings = {
            "pipeline": "distill",
            "model": {"path": str(model_folder)},
            "teacher": teacher,
            "data": {"max_prompt_tokens": 64},
            "rollout": {"max_new_tokens": 16, "temperature": 1.0},
        }
        layout = RoleLayout(MappingProxyType({**LAYOUT, "teacher": (2,)}), 3)
        worker = Worker(threads.worlds[2], parse(settings), layout, model_folder, model_folder.parent)
        worker.world.default_group("training", [2], next(EPOCHS))
        return make_teacher(worker)

    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


def teach(role: TeacherRole, batch: Batch) -> Done:
    role._worker.batches[4] = batch
    rows = [[row] for row in range(batch.num_sequences)]
    done = role.handlers()[Teach](Teach(4, widths_of(role._worker.config), rows), 1)
    assert isinstance(done, Done)
    return done


def section(server: TeacherServer, **more: Any) -> dict[str, Any]:
    return {"url": server.url, "model": "teacher", "api_key_env": KEY, "retry_s": 3, "backoff_s": 0.02, **more}


def look(server: TeacherServer, tokenizer: Any, top_k: int = 0, time_s: float = 10.0, **given: Any) -> None:
    """The check before the start, for sequences of 80 tokens."""
    endpoint = TeacherEndpoint(**section(server) | given)
    model, key_env = endpoint.model or "", endpoint.api_key_env
    probe(PromptLogprobs(endpoint, top_k, 80), model, key_env, tokenizer, 80, time.monotonic() + time_s)


def rows() -> Batch:
    batch = make_batch([6, 7, 30])
    batch.token_ids = batch.token_ids % 300
    return batch


@pytest.mark.parametrize("protocol", ["sglang", "openai"])
def test_log_probs_in_other_protocols_are_those_of_the_same_model_in_a_folder(
    make: Callable[..., TeacherRole], server: TeacherServer, folder: Path, tokenizer: Any, protocol: str
) -> None:
    batch, other = rows(), rows()
    teach(make({"path": str(folder)}), batch)
    teach(make({"endpoint": section(server, protocol=protocol)}), other)
    assert batch.teacher_logprobs is not None and other.teacher_logprobs is not None
    assert torch.allclose(other.teacher_logprobs, batch.teacher_logprobs, rtol=0, atol=LOGPROBS)
    assert {*server.paths} == {"/v1/models", {"sglang": "/generate", "openai": "/v1/completions"}[protocol]}
    look(server, tokenizer, protocol=protocol)
    if protocol == "sglang":
        look(server, tokenizer, protocol=protocol, url=server.url.removesuffix("/v1"))


def test_the_top_k_of_sglang_are_those_of_the_same_model_in_a_folder(
    make: Callable[..., TeacherRole], server: TeacherServer, folder: Path
) -> None:
    batch, other, form = rows(), rows(), {"form": "top_k", "top_k": 7}
    teach(make({"path": str(folder), **form}), batch)
    teach(make({"endpoint": section(server, protocol="sglang"), **form}), other)
    assert torch.equal(other.columns["teacher_topk_ids"], batch.columns["teacher_topk_ids"])
    given, expected = (each.columns["teacher_topk_logprobs"] for each in (other, batch))
    assert torch.allclose(given, expected, rtol=0, atol=LOGPROBS) and expected.any()


TRIPLES = [[None, 5, "a"], [-0.5, 7, "b"], [-2.0, 9, None]]
TOPS = [None, [[-0.5, 7, "b"], [-1.5, 3, "c"]], [[-0.25, 4, "d"], [-2.0, 9, None]]]


def test_answers_of_sglang_are_read_as_documented() -> None:
    def read(k: int = 0, **meta: Any) -> Told:
        found = {"prompt_tokens": 3, "input_token_logprobs": TRIPLES, "output_token_logprobs": [[-1.0, 2, "e"]], **meta}
        return read_generated(json.dumps({"text": "e", "meta_info": found}).encode(), [5, 7, 9], k)

    told = read()
    assert (told.logprobs, told.texts, told.best) == ([-0.5, -2.0], ["b", None], [[], []])
    assert read(2, input_top_logprobs=TOPS).best == [[(7, -0.5), (3, -1.5)], [(4, -0.25), (9, -2.0)]]
    for k, meta, text in (
        (0, {"input_token_logprobs": None}, "has no input_token_logprobs; the server must give"),
        (0, {"input_token_logprobs": TRIPLES[1:]}, "has log-probs of 2 tokens, 3 were asked about"),
        (0, {"input_token_logprobs": [*TRIPLES[:2], [-2.0, 8, "x"]]}, "no log-prob of token 9 at place 2"),
        (0, {"input_token_logprobs": [*TRIPLES[:2], [None, 9, "x"]]}, "no log-prob of token 9 at place 2"),
        (0, {"input_token_logprobs": [*TRIPLES[:2], [0.5, 9, "x"]]}, "has the log-prob 0.5 at place 2"),
        (0, {"input_token_logprobs": [*TRIPLES[:2], [-0.5, 9]]}, "not as expected"),
        (2, {}, "most probable tokens .* of 0 places"),
        (3, {"input_top_logprobs": TOPS}, "has 2 tokens at place 1, not the 3 most probable ones"),
        (2, {"input_top_logprobs": [None, [[-0.1, 7, "b"], [-0.1, 3, "c"]], TOPS[2]]}, "place 1 have a sum above 1"),
        (2, {"input_top_logprobs": [None, None, TOPS[2]]}, "has 0 tokens at place 1"),
    ):
        with pytest.raises(ValueError, match=text):
            read(k, **meta)


def test_answers_of_openai_are_read_as_documented() -> None:
    def read(logprobs: Any, **usage: int) -> Told:
        answer = {"choices": [{"text": "abc", "logprobs": logprobs}]} | ({"usage": usage} if usage else {})
        return read_echo(json.dumps(answer).encode(), [5, 7, 9], 0)

    known = {"tokens": ["a", "b", "c", "d"], "token_logprobs": [None, -0.5, -2.0, -3.0], "top_logprobs": [None]}
    told = read(known)
    assert (told.logprobs, told.texts, told.best) == ([-0.5, -2.0], ["b", "c"], [[], []])
    assert read({"token_logprobs": [None, -0.5, -2.0]}, prompt_tokens=3).texts == [None, None]
    only_new = {"tokens": ["d"], "token_logprobs": [-3.0]}
    for logprobs, usage, text in (
        (None, {}, "the answer has no logprobs; the server must give log-probs"),
        (only_new, {}, "has log-probs of 1 tokens, 3 were asked about"),
        (only_new, {"prompt_tokens": 3}, r"1 tokens, not the prompt's \(echo=true\)"),
        (known, {"prompt_tokens": 4}, "has log-probs of 4 tokens, 3 were asked about"),  # a token was added before
        ({"token_logprobs": [None, None, -2.0]}, {}, "no log-prob of token 7 at place 1"),
        (known | {"tokens": ["a"]}, {}, "has 4 log-probs and 1 texts"),
        (known | {"token_logprobs": [None, 0.5, -1.0, -1.0]}, {}, "has the log-prob 0.5 at place 1"),
        ({"token_logprobs": "none"}, {}, "not as expected"),
    ):
        with pytest.raises(ValueError, match=text):
            read(logprobs, **usage)


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2)], ids=["sequences", "steps"])
def test_log_probs_are_those_of_the_same_model_in_a_folder(
    make: Callable[..., TeacherRole], server: TeacherServer, folder: Path, counts: tuple[int, ...]
) -> None:
    batch, other = (rows() if len(counts) == 3 else by_steps(rows(), counts) for _ in range(2))
    teach(make({"path": str(folder)}), batch)
    done = teach(make({"endpoint": section(server, max_in_flight=2)}), other)
    assert batch.teacher_logprobs is not None and other.teacher_logprobs is not None
    mask = batch.loss_mask
    assert torch.allclose(other.teacher_logprobs, batch.teacher_logprobs, rtol=0, atol=LOGPROBS)
    assert (other.teacher_logprobs[mask] < 0).all() and not other.teacher_logprobs[~mask].any()
    assert flatten(done.stats) == {"teacher/requests": 3, "teacher/retries": 0}
    ends = [int(mask[a:b].nonzero()[-1]) + 1 for a, b in itertools.pairwise(batch.cu_segments.tolist())]
    assert sorted(map(len, server.prompts[-3:])) == sorted(ends)  # nothing after the last trained token
    other.token_ids[mask.nonzero()[-1, 0]] = 318  # the last token of the last row, which the tokenizer lacks
    before = other.teacher_logprobs.clone()
    role = make({"endpoint": section(server)})
    role._num_known = 318  # type: ignore[attr-defined]
    teach(role, other)
    assert other.teacher_logprobs[mask][-1] == UNKNOWN
    assert torch.allclose(other.teacher_logprobs[mask][:-1], before[mask][:-1], rtol=0, atol=LOGPROBS)
    assert 318 not in server.prompts[-1] + server.prompts[-2] + server.prompts[-3]


def test_the_top_k_are_those_of_the_same_model_in_a_folder(
    make: Callable[..., TeacherRole], server: TeacherServer, folder: Path
) -> None:
    batch, other = rows(), rows()
    teach(make({"path": str(folder), "form": "top_k", "top_k": 7}), batch)
    teach(make({"endpoint": section(server), "form": "top_k", "top_k": 7}), other)
    assert torch.equal(other.columns["teacher_topk_ids"], batch.columns["teacher_topk_ids"])
    given, expected = (each.columns["teacher_topk_logprobs"] for each in (other, batch))
    assert torch.allclose(given, expected, rtol=0, atol=LOGPROBS) and expected.any()


def test_a_server_that_fails_for_a_while_costs_retries_and_a_dead_one_the_run(
    make: Callable[..., TeacherRole], server: TeacherServer
) -> None:
    role, failed = make({"endpoint": section(server, retry_s=30)}), []

    def change(answer: dict[str, Any], number: int) -> Any:
        failed.append(number)
        return (503, {"error": "busy"}) if len(failed) == 1 else None if len(failed) == 2 else answer

    server.change = change
    batch = rows()
    done = teach(role, batch)
    assert flatten(done.stats) == {"teacher/requests": 5, "teacher/retries": 2}
    assert batch.teacher_logprobs is not None and (batch.teacher_logprobs[batch.loss_mask] < 0).all()
    role = make({"endpoint": section(server, retry_s=0.3)})
    server.close()
    with pytest.raises(EndpointError, match=r"^teacher.endpoint: http:.*no answer in time.*Connection refused"):
        teach(role, rows())


def test_a_batch_that_takes_too_long_names_the_endpoint(
    make: Callable[..., TeacherRole], server: TeacherServer
) -> None:
    role = make({"endpoint": section(server)})
    config = role._worker.config
    role._worker.config = config.model_copy(  # type: ignore[misc]
        update={"timeouts": config.timeouts.model_copy(update={"command_s": 0.4})}
    )
    server.change = lambda answer, _: time.sleep(5) or answer
    started = time.monotonic()
    with pytest.raises(EndpointError, match=r"teacher.endpoint: .*(sequences have an answer after|no answer in time)"):
        teach(role, rows())
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "tutor"}, "teacher.endpoint.model: URL has no 'tutor'; it has 'teacher'"),
        ({"api_key_env": None}, "teacher.endpoint.api_key_env: URL/models: status 401: .*give the key's environment"),
        ({"api_key_env": "WRONG"}, r"status 401: .*Bearer \*\*\*.*; check the key in WRONG$"),
        ({"api_key_env": "MISSING"}, "teacher.endpoint.api_key_env: MISSING is not set"),
        ({"url": "URL/v1"}, "teacher.endpoint.url: URL/v1/completions: status 404: .*give the address with /v1"),
        ({"top_k": 21}, "teacher.top_k: .*greater than max allowed: 20.*; lower it, or raise .*--max-logprobs"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_address_is_refused_before_the_start(
    tokenizer: Any, server: TeacherServer, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("WRONG", "open-barley")
    given = {key: value.replace("URL", server.url) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(ValueError, match=expected.replace("URL", server.url)) as caught:
        look(server, tokenizer, **given)
    assert "\n" not in str(caught.value) and "barley" not in str(caught.value) and "sesame" not in str(caught.value)


def test_a_server_that_does_not_listen_is_asked_again_until_the_deadline(tokenizer: Any, server: TeacherServer) -> None:
    server.close()
    with pytest.raises(EndpointError, match=r"/models: no answer in time; .*Connection refused"):
        look(server, tokenizer, time_s=0.2)


def first(answer: dict[str, Any]) -> list[Any]:
    found = answer["choices"][0]["prompt_logprobs"]
    assert isinstance(found, list)
    return found


def own(found: dict[str, Any]) -> dict[str, Any]:
    entry = next(iter(found.values()))
    assert isinstance(entry, dict)
    return entry


def changed(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(answer: dict[str, Any], number: int) -> Any:
        given = edit(answer)
        return given if isinstance(given, bytes | tuple) else answer

    return change


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda a: a["choices"][0].pop("prompt_logprobs"), "the answer has no prompt_logprobs; the server must give"),
        (lambda a: a["choices"][0].update(prompt_logprobs=None), "the answer has no prompt_logprobs"),
        (lambda a: first(a).pop(), "has log-probs of 254 tokens, 255 were asked about"),
        (lambda a: first(a).__setitem__(3, None), "no log-prob of token 2 at place 3"),
        (lambda a: first(a).__setitem__(3, {"9": own(first(a)[3])}), "no log-prob of token 2 at place 3"),
        (lambda a: own(first(a)[3]).update(logprob=0.5), "log-prob 0.5 at place 3; log-probs are at most 0.*raw_logp"),
        (lambda a: json.dumps(a).replace('"logprob": -', '"logprob": -9e999, "x": -', 1).encode(), "-inf|out of range"),
        (lambda a: json.dumps(a).replace('"logprob": -', '"logprob": NaN, "x": -', 1).encode(), "not as expected"),
        (lambda a: own(first(a)[3]).update(logprob="-1"), "not as expected"),
        (lambda a: own(first(a)[3]).update(decoded_token="\x1b[31mred"), r"tokenizer .*'\\x1b\[31mred'"),
        (lambda a: [own(e).update(decoded_token=None) for e in first(a)[1:]], "gives no texts of tokens"),
        (lambda a: b"<html>", "the answer is not as expected"),
        (lambda a: b"[" * 100_000, "the answer is not as expected"),
        (lambda a: b" " * (1 << 24), "the answer has more than"),
    ],
)
def test_a_server_without_sound_log_probs_is_refused_before_the_start(
    tokenizer: Any, server: TeacherServer, edit: Callable[[dict[str, Any]], Any], expected: str
) -> None:
    server.change = changed(edit)
    with pytest.raises(ValueError, match=expected) as caught:
        look(server, tokenizer)
    assert str(caught.value).startswith("teacher.endpoint.") and str(caught.value).isprintable()


def test_another_tokenizer_is_refused_by_name(
    tokenizer: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in decodes with its own tokenizer: one special token has another text, and all else is equal."""
    monkeypatch.setenv(KEY, "sesame")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace("<|im_end|>", "<|stop|>"))
    server = TeacherServer(other)
    try:
        with pytest.raises(ValueError, match=r"token 2 is '<\|stop\|>', the policy's is '<\|im_end\|>'; give a model"):
            look(server, tokenizer)
    finally:
        server.close()


def test_a_short_context_is_refused(tokenizer: Any, server: TeacherServer) -> None:
    server._max_model_len = 81
    look(server, tokenizer)  # fewer texts are compared
    assert len(server.prompts[-1]) == 80 and server.paths == ["/v1/models", "/v1/completions"]
    server._max_model_len = 80
    with pytest.raises(ValueError, match="teacher takes 80 tokens, but the longest sequence has 80, and one new token"):
        look(server, tokenizer)


def test_compared_tokens_are_of_all_the_vocabulary(tokenizer: Any) -> None:
    known = sorted(tokenizer.get_vocab().values())
    ids = compared_ids(tokenizer, 40)
    assert len(ids) == 40 and ids[0] == ids[1] and len({*ids}) == 39 and ids[-1] == known[-1]
    assert {*tokenizer.added_tokens_decoder} <= {*ids[1:]}
    assert max(b - a for a, b in itertools.pairwise(ids[1:])) < 3 * len(known) / 40
    assert compared_ids(tokenizer, 10_000)[1:] == known


def test_answers_of_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/workers/goldens/vllm_answers.py recorded them; the log-probs are those of transformers."""
    from transformers import AutoModelForCausalLM

    golden = json.loads(GOLDEN.read_text())
    write_model(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    monkeypatch.setenv(KEY, golden["key"])
    server = TeacherServer(tmp_path / "teacher", key=golden["key"], max_model_len=golden["max_model_len"])
    given = PromptLogprobs(TeacherEndpoint(url=server.url, model="teacher", api_key_env=KEY), 3, 100)
    stand_in = given.ask(golden["prompt"], time.monotonic() + 10, Counter())
    server.close()
    with torch.no_grad():
        expected = model(torch.tensor([golden["prompt"]])).logits[0].double().log_softmax(-1)[:-1]
    for k in (0, 3):
        told = read_completion(json.dumps(golden["answers"][str(k)]).encode(), golden["prompt"], k)
        drawn = expected.gather(1, torch.tensor(golden["prompt"][1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(told.logprobs).double(), drawn, rtol=0, atol=1e-4)
        assert all(len(best) == k for best in told.best)
    best, ids = expected.topk(3)
    assert [[number for number, _ in place] for place in told.best] == ids.tolist()
    assert torch.allclose(torch.tensor([[p for _, p in place] for place in told.best]).double(), best, atol=1e-4)
    assert stand_in.texts == told.texts
    assert [[n for n, _ in place] for place in stand_in.best] == ids.tolist()


def test_keys_stay_out_of_the_configuration() -> None:
    config: Config = parse({"teacher": {"endpoint": {"url": "https://host/v1/", "model": "m", "api_key_env": KEY}}})
    assert config.teacher.endpoint.url == "https://host/v1"
    for url in ("https://me:pw@host/v1", "https://host/v1?key=1", "host/v1", "file:///etc"):
        with pytest.raises(Exception, match=r"teacher.endpoint.url"):
            parse({"teacher": {"endpoint": {"url": url, "model": "m"}}})
