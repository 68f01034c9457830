"""SGLang's adapter on its stand-in (beside its contract, tests/contracts): caches, weights, ranks, and its failures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpcrl.config import Config, TinyModel, load
from hpcrl.engines.gen.base import ReplicaRanks, Request, SamplingParams
from hpcrl.engines.gen.sglang import engine as adapter
from hpcrl.engines.gen.sglang.child import Child
from hpcrl.engines.gen.sglang.sizes import cache, check
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.planner.shapes import read_shape
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.tables import GEN_ENGINES
from tests.contracts.gen.sglang import STANDIN, forget, make_engine, start
from tests.engines.worlds import run_ranks

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(TinyModel(vocab_size=VOCAB), folder)
    yield folder
    forget()


@pytest.fixture
def started() -> list[Any]:
    """The servers that `recording` started."""
    return []


def recording(started: list[Any], arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    started.append(start(arguments, environment))
    return started[-1]


def weights_of(folder: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [(name, scale * parameter.detach()) for name, parameter in model.named_parameters()]


def ask(number: int, new: int = 12, **params: Any) -> Request:
    sampling = SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **params})
    return Request(number, [(11 * number + k) % VOCAB for k in range(4 + number)], sampling, seed=number)


def answers(engine: Any, requests: list[Request], burst: int = 4) -> dict[int, Any]:
    engine.add(requests)
    found = {}
    while engine.progress():
        found |= {output.id: output for output in engine.step(burst)}
    return found


def test_prefixes_of_old_weights_are_dropped_or_kept_for_running_responses_alone(
    folder: Path, started: list[Any]
) -> None:
    engine = make_engine(folder, start=functools.partial(recording, started))
    sglang = started[0]._engine
    answers(engine, [ask(0)])
    engine.load_weights(weights_of(folder), 1)
    assert sglang.calls[-1] == "flush_cache"
    engine.add([ask(0)])
    engine.step(4)
    engine.load_weights(weights_of(folder), 2)
    assert sglang.calls[-1] == "end_weight_update", "the running response goes on with its cache"
    engine.add([ask(1)])
    engine.step(4)
    assert sglang.tokenizer_manager.salts[-2:] == ["1", "2"]
    engine.recompute()
    engine.step(1)
    assert sglang.tokenizer_manager.salts[-2:] == ["2", "2"]
    engine.close()


def test_weights_go_in_buckets_and_logprobs_are_theirs(
    folder: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(adapter, "BUCKET_BYTES", 1 << 14)
    engine = make_engine(folder, start=functools.partial(recording, started), load=False)
    changed = weights_of(folder, 1.5)
    engine.load_weights(iter(changed), 0)
    updates = started[0]._engine.calls.count("update_weights_from_tensor")
    assert 1 < updates < len(changed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(dict(changed), strict=False)
    requests = [ask(i) for i in range(3)]
    for i, output in answers(engine, requests).items():
        ids = torch.tensor([[*requests[i].prompt_ids, *output.token_ids.tolist()]])
        with torch.no_grad():
            wanted = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        np.testing.assert_allclose(output.gen_logprobs, wanted[len(requests[i].prompt_ids) - 1 :, 0], atol=2e-5)
    engine.close()


def test_an_update_that_broke_off_is_closed_by_the_next(folder: Path, started: list[Any]) -> None:
    engine = make_engine(folder, start=functools.partial(recording, started))
    weights = weights_of(folder)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield weights[0]
        raise RuntimeError("a sender is lost")

    with pytest.raises(RuntimeError, match="a sender is lost"):
        engine.load_weights(breaking(), 1)
    engine.load_weights(iter(weights), 2)
    assert engine.version == 2 and len(answers(engine, [ask(0)])[0].token_ids) == 12
    engine.close()


def test_memory_is_given_back_once_and_weights_come_anew(folder: Path, started: list[Any]) -> None:
    engine = make_engine(folder, start=functools.partial(recording, started), sleeps=True)
    whole = answers(engine, [ask(0)])[0]
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert started[0]._engine.calls[-2:] == ["release_memory_occupation", "resume_memory_occupation"]
    engine.sleep()  # what is awake
    engine.load_weights(weights_of(folder), 1)
    assert started[0]._engine.calls.count("resume_memory_occupation") == 2  # the KV cache not yet
    assert answers(engine, [ask(0)])[0].token_ids.tolist() == whole.token_ids.tolist()
    assert started[0]._engine.calls.count("resume_memory_occupation") == 3
    engine.close()


def test_a_stop_string_ends_a_response_wherever_bursts_end(folder: Path) -> None:
    from transformers import AutoTokenizer

    engine = make_engine(folder, tokenizer=AutoTokenizer.from_pretrained(folder), max_length=80)
    whole = answers(engine, [ask(0, 40)])[0].token_ids
    decode = engine._stops._tokenizer.decode
    last = next(
        k for k in range(4, 40) if decode(whole[k - 1 : k + 1]).isascii() and len(decode(whole[k - 1 : k + 1])) > 1
    )
    stop = decode(whole[last - 1 : last + 1])
    first = next(k for k in range(1, 41) if stop in decode(whole[:k]))
    for burst in (1, 3, 40):
        output = answers(engine, [ask(0, 40, stop=(stop,))], burst)[0]
        assert output.finish_reason is FinishReason.STOP and output.token_ids.tolist() == whole[:first].tolist()
        assert len(output.gen_logprobs) == len(output.versions) == first
    engine.close()


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"top_k": 1}, {"top_k": 5000}])
def test_sampling_whose_logprobs_sglang_does_not_give_is_refused(folder: Path, params: dict[str, Any]) -> None:
    engine = make_engine(folder)
    with pytest.raises(ValueError, match=r"request 1: SGLang gives the log-probs of truncated sampling"):
        engine.add([ask(0), ask(1, **params)])
    assert engine.progress() == {}
    engine.close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("token", "request 0: SGLang gave the token 1073741824, outside the vocabulary of 320"),
        ("nan", "request 0: the log-probs are not finite under weights version 0"),
        ("short", "request 0: SGLang made 0 of 4 tokens"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(
    folder: Path, wrong: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    import sglang

    monkeypatch.setattr(sglang, "WRONG", wrong)
    with pytest.raises((RuntimeError, FloatingPointError), match=text):
        answers(engine, [ask(0)])
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("die", r"SGLang \(pid \d+, burst\) was ended by SIGKILL; its last lines:\n  the scheduler hit an exception"),
        (
            "hang",
            r"SGLang \(pid \d+, burst\) gave no answer for 2 s; its last lines:\n  the scheduler hit an exception",
        ),
    ],
)
def test_a_process_that_dies_or_hangs_is_named(
    folder: Path, wrong: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STANDIN)
    monkeypatch.setenv("SGLANG_STANDIN_WRONG", wrong)
    engine = make_engine(folder, start=functools.partial(Child, start_s=200.0, call_s=60.0), load=False)
    engine.load_weights(iter(weights_of(folder)), 0)  # through shared memory
    engine.add([ask(0, 40)])
    assert engine.step(8) == engine.step(4) == [] and engine.progress() == {0: 12}
    if wrong == "hang":
        engine._server._call_s = 2.0
    with pytest.raises((RuntimeError, TimeoutError), match=text):
        answers(engine, [])
    engine.close()
    assert not engine._server._process.is_alive()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_sglang_refuses_is_told_with_its_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STANDIN)
    with pytest.raises(
        ValueError, match=r"SGLang refuses .* with generator\.sglang\.options=.*nonsense.*: .*'nonsense'"
    ):
        make_engine(folder, options={"nonsense": 1}, start=functools.partial(Child, start_s=200.0, call_s=5.0))
    with pytest.raises(
        ValueError, match=r"SGLang refuses .*: ServerArgs.page_size: Optional\[int\] is needed, got str"
    ):
        make_engine(folder, options={"page_size": "many"})


def member(folder: Path) -> tuple[Any, ...]:
    rank, group = dist.get_rank(), dist.new_group()
    engine = make_engine(folder, replica=ReplicaRanks((0, 1), rank, group), load=False)
    owns = engine._server is not None
    engine.load_weights(iter(weights_of(folder) if owns else []), 0)
    engine.add([ask(i) for i in range(6)])
    engine.step(3)
    (aborted,) = engine.abort([2])
    outputs = {output.id: output for output in [aborted, *answers(engine, []).values()]}
    split = engine._server._engine._arguments["tp_size"] if owns else 0
    engine.sleep()
    engine.close()
    return owns, split, {i: dataclasses.astuple(output) for i, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_rank_of_a_replica_owns_the_engine_and_all_know_what_it_made(folder: Path) -> None:
    (owns, split, first), (other_owns, _, second) = run_ranks(2, member, folder)
    assert owns and not other_owns and split == 2
    assert first.keys() == second.keys() == set(range(6)) and len(first[2][1]) == 3
    for i, output in first.items():
        for mine, theirs in zip(output, second[i], strict=True):
            assert np.array_equal(mine, theirs)


def planned(words: list[str], vocab_size: int = 151936) -> tuple[Config, Any]:
    sizes = {"vocab_size": vocab_size, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
    return load(["generator.engine=sglang", *words]), read_shape({"model_type": "qwen2", **sizes})


def test_the_first_rank_gets_the_weights_whole_and_the_others_none() -> None:
    config, _ = planned([])
    need = GEN_ENGINES["sglang"].need
    assert need(config, None, "w", (4, 6), 0, 2).boxes == (((0, 4), (0, 6)),)
    assert need(config, None, "w", (4, 6), 1, 2).boxes == ()


@pytest.mark.parametrize(
    ("words", "vocab_size", "lines"),
    [
        (["rollout.top_p=.9"], 151936, ["rollout.top_k: 0, with rollout.top_p=0.9, but SGLang gives the log-probs"]),
        (["rollout.top_p=.9"], 4000, []),
        (["rollout.top_p=.9", "rollout.top_k=100"], 151936, []),
        (
            ["generator.sglang.kv_cache_gib=.01"],
            151936,
            ["generator.sglang.kv_cache_gib: 0.01 GiB of KV cache, but 1280 tokens, the longest prompt and resp"],
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(words: list[str], vocab_size: int, lines: list[str]) -> None:
    found = [problem.text for problem in check(*planned(words, vocab_size))]
    assert len(found) == len(lines) and all(text.startswith(line) for text, line in zip(found, lines, strict=True))


def test_the_plan_counts_the_cache_that_was_given() -> None:
    assert cache(*planned(["generator.sglang.kv_cache_gib=2"])) == (2 << 30, 2 << 30)
    whole, least = cache(*planned(["generator.max_slots=3"]))
    assert whole == 3 * least
