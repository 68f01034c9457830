"""SGLang's adapter (beside its contract, tests/contracts): its handling of answers, and with the real SGLang on a CPU
(tests/sglang_cpu) caches, weights, ranks and failures."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from hpcrl.config import Config, load
from hpcrl.engines.gen.generation_engine import ReplicaRanks, Request, SamplingParams
from hpcrl.engines.gen.sglang import engine as adapter
from hpcrl.engines.gen.sglang.child import last_error
from hpcrl.engines.gen.sglang.server import Made
from hpcrl.engines.gen.sglang.sizes import cache, check
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.models.families import read_shape
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.installed import fields
from hpcrl.spec.tables import GEN_ENGINES
from tests.contracts.gen.sglang import MODEL, make_engine, make_model, own, weights_of
from tests.engines.worlds import run_ranks

VOCAB = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture
def folder(model: Path) -> Path:
    """The model's, for tests with the real SGLang."""
    pytest.importorskip("sglang", reason="SGLang is not installed; make test-outside")
    return model


def real(test: Any) -> Any:
    """Markers of a test with the real SGLang."""
    for mark in (pytest.mark.outside, pytest.mark.slow, pytest.mark.timeout(300)):
        test = mark(test)
    return test


class Answers:
    """A Server that gives these answers to a decode chunk, to test the adapter."""

    def __init__(self, *made: Made):
        self._made = list(made)

    def call(self, name: str, *arguments: Any) -> Any:
        return self._made if name == "decode_chunk" else None

    def close(self) -> None:
        pass


def answered(model: Path, *made: Made) -> Any:
    return make_engine(model, start=lambda arguments, environment: Answers(*made), load=True)


def ask(number: int, new: int = 12, **params: Any) -> Request:
    sampling = SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **params})
    return Request(number, [(11 * number + k) % VOCAB for k in range(4 + number)], sampling, seed=number)


def answers(engine: Any, requests: list[Request], decode_chunk: int = 4) -> dict[int, Any]:
    engine.add(requests)
    found = {}
    while engine.progress():
        found |= {output.id: output for output in engine.step(decode_chunk)}
    return found


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"top_k": 1}, {"top_k": 5000}])
def test_sampling_without_log_probs_from_sglang_is_refused(model: Path, params: dict[str, Any]) -> None:
    engine = answered(model)
    with pytest.raises(ValueError, match=r"request 1: SGLang gives the log-probs of truncated sampling"):
        engine.add([ask(0), ask(1, **params)])
    assert engine.progress() == {}


@pytest.mark.parametrize(
    ("tokens", "logprobs", "error", "text"),
    [
        ([1, 1 << 30], [-1.0, -1.0], RuntimeError, "the token 1073741824, outside the vocabulary of 320"),
        ([1, 2], [-1.0, np.nan], FloatingPointError, "the log-probs are not finite under weights version 0"),
        ([1, 2], [-1.0], RuntimeError, "SGLang gave 2 tokens, 1 log-probs and 0 after truncation"),
    ],
)
def test_an_inconsistent_answer_is_refused(
    model: Path, tokens: list[int], logprobs: list[float], error: type[Exception], text: str
) -> None:
    engine = answered(model, Made(0, 0, tokens, logprobs, [], False))
    engine.add([ask(0)])
    with pytest.raises(error, match=f"request 0: .*{text}"):
        engine.step(2)


class Counting(Answers):
    """A Server whose responses are the request's number again and again."""

    def call(self, name: str, *arguments: Any) -> Any:
        if name != "decode_chunk":
            return None
        jobs, num_tokens, max_num_seqs = arguments
        counts = [(job.id, min(job.left, num_tokens)) for job in jobs[:max_num_seqs]]
        return [Made(i, 0, [i] * count, [-float(i)] * count, [], False) for i, count in counts]


def member(model: Path) -> tuple[Any, ...]:
    rank, group = dist.get_rank(), dist.new_group()
    started: list[Mapping[str, Any]] = []

    def start(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Counting:
        started.append(arguments)
        return Counting()

    engine = make_engine(model, replica=ReplicaRanks((0, 1), rank, group), start=start)
    engine.load_weights(iter(weights_of(model) if started else []), 0)
    engine.add([ask(i) for i in range(6)])
    engine.step(3)
    (aborted,) = engine.abort([2])
    outputs = {output.id: output for output in [aborted, *answers(engine, []).values()]}
    engine.sleep()
    return [arguments["tp_size"] for arguments in started], {i: dataclasses.astuple(o) for i, o in outputs.items()}


def test_experts_are_sent_one_by_one_under_sglangs_names() -> None:
    inner, hidden, at = 3, 4, "model.layers.1.mlp.experts"
    gates, ups, downs = torch.rand(2, inner, hidden), torch.rand(2, inner, hidden), torch.rand(2, hidden, inner)
    given = [(f"{at}.gate_up_proj", torch.cat([gates, ups], 1)), (f"{at}.down_proj", downs), ("model.norm.weight", ups)]
    found = dict(adapter.one_by_one(given, True))
    for expert in range(2):
        for kind, stacked in (("gate", gates), ("up", ups), ("down", downs)):
            assert torch.equal(found.pop(f"{at}.{expert}.{kind}_proj.weight"), stacked[expert])
    assert found == {"model.norm.weight": ups}
    with pytest.raises(ValueError, match=r"weight .*gate_up_proj: SGLang's names for the experts"):
        dict(adapter.one_by_one(given, False))


@pytest.mark.slow
def test_the_first_rank_owns_the_engine_and_broadcasts_its_results(model: Path) -> None:
    (started, first), (other, second) = run_ranks(2, member, model)
    assert started == [2] and not other
    assert first.keys() == second.keys() == set(range(6)) and first[2][1].tolist() == [2, 2, 2]
    for i, output in first.items():
        for mine, theirs in zip(output, second[i], strict=True):
            assert np.array_equal(mine, theirs)


def test_the_last_traceback_gives_the_error() -> None:
    first = ["a", "[08:00] Traceback (most recent call last):", "  File x", "KeyError: 1"]
    last = ["[08:01] Scheduler hit an exception: Traceback (most recent call last):", "  File y", "", "ValueError: no"]
    assert last_error([*first, *last, "UserWarning: z"]) == ("ValueError: no", [*first, *last])
    assert last_error(["a", "b"]) == ("", ["a", "b"])
    assert last_error([*first, last[0], "  cut"]) == ("", [*first, last[0], "  cut"])


@real
def test_prefixes_of_old_weights_are_dropped_or_kept_only_for_running_responses(folder: Path) -> None:
    engine, weights = make_engine(folder), weights_of(folder)
    asked = engine._server.asked

    def salts() -> list[str]:
        return [job.salt for job in asked[-1][1]]

    engine.load_weights(weights, 0)
    answers(engine, [ask(0)])
    engine.load_weights(weights, 1)
    assert asked[-1] == ("forget",)
    engine.add([ask(0)])
    engine.step(4)
    engine.load_weights(weights, 2)
    assert asked[-1] == ("end_update",), "the running response goes on with its cache"
    engine.add([ask(1)])
    engine.step(4)
    assert salts() == ["1", "2"]
    engine.recompute()
    engine.step(1)
    assert salts() == ["2", "2"]


@real
def test_weights_are_sent_in_buckets_and_determine_the_log_probs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(adapter, "BUCKET_BYTES", 1 << 14)
    engine, changed = make_engine(folder), weights_of(folder, 1.5)
    engine.load_weights(iter(changed), 0)
    updates = [name for name, *_ in engine._server.asked].count("update")
    assert 1 < updates < len(changed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(dict(changed), strict=False)
    requests = [ask(i, temperature=1.0 - i / 4, top_k=5 * (i == 1), top_p=0.9 if i == 2 else 1.0) for i in range(3)]
    for i, output in answers(engine, requests).items():
        ids, start = torch.tensor([[*requests[i].prompt_ids, *output.token_ids.tolist()]]), len(requests[i].prompt_ids)
        with torch.no_grad():
            wanted = (model(ids).logits[0, start - 1 : -1] / requests[i].params.temperature).log_softmax(-1)
        drawn = ids[0, start:, None]
        np.testing.assert_allclose(output.gen_logprobs, wanted.gather(1, drawn)[:, 0], atol=2e-5)
        if requests[i].params.truncates:
            np.testing.assert_allclose(
                output.gen_logprobs_behaviour, kept(wanted, drawn, requests[i].params), atol=2e-5
            )


def kept(logprobs: torch.Tensor, drawn: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probs of the drawn tokens [n, 1] after SGLang's truncation: top-p of all tokens, unlike other engines."""
    values, ids = logprobs.exp().sort(dim=-1, descending=True)
    keep = values.cumsum(-1) - values <= params.top_p
    keep &= torch.arange(VOCAB) < (params.top_k or VOCAB)
    values = torch.where(keep, values, 0.0)
    return (values / values.sum(-1, keepdim=True)).log()[ids == drawn]


@real
def test_expert_weights_are_updated(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = MODEL.model_copy(update={"architecture": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": False})
    make_tiny_model(spec, tmp_path / "model")
    engine, changed = make_engine(tmp_path / "model", start=own), weights_of(tmp_path / "model", 1.5)
    engine.load_weights(iter(changed), 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.load_state_dict(dict(changed))
    output = answers(engine, [ask(0)])[0]
    ids = torch.tensor([[*ask(0).prompt_ids, *output.token_ids.tolist()]])
    with torch.no_grad():
        wanted = model(ids).logits[0, -len(output.token_ids) - 1 : -1].log_softmax(-1)
    drawn = ids[0, -len(output.token_ids) :, None]
    np.testing.assert_allclose(output.gen_logprobs, wanted.gather(1, drawn)[:, 0], atol=2e-5)
    engine.close()


@real
def test_a_response_does_not_depend_on_sampling_of_other_requests(folder: Path) -> None:
    """Training draws from all tokens while an evaluation truncates or is greedy."""
    engine = make_engine(folder)
    engine.load_weights(weights_of(folder), 0)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.8}, {}]
    requests = [ask(i, **kind) for i, kind in enumerate(kinds)]
    together = answers(engine, requests)
    for request in requests:
        alone = answers(engine, [request])[request.id]
        assert together[request.id].token_ids.tolist() == alone.token_ids.tolist()
    crowded = make_engine(folder, max_num_seqs=2)  # a request waits for a slot of its kind, or for a later chunk
    crowded.load_weights(weights_of(folder), 0)
    for i, output in answers(crowded, requests[::-1], decode_chunk=5).items():
        assert output.token_ids.tolist() == together[i].token_ids.tolist()


@real
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}])
def test_non_finite_weights_are_reported(folder: Path, params: dict[str, Any]) -> None:
    engine = make_engine(folder)
    engine.load_weights(weights_of(folder, np.nan), 3)
    with pytest.raises(FloatingPointError, match="request 0: the log-probs are not finite under weights version 3"):
        answers(engine, [ask(0, **params)])


@real
def test_an_aborted_update_is_closed_by_the_next_one(folder: Path) -> None:
    engine, weights = make_engine(folder), weights_of(folder)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield weights[0]
        raise RuntimeError("a sender is lost")

    with pytest.raises(RuntimeError, match="a sender is lost"):
        engine.load_weights(breaking(), 1)
    engine.load_weights(iter(weights), 2)
    assert engine.version == 2 and len(answers(engine, [ask(0)])[0].token_ids) == 12


@real
def test_memory_is_released_once_and_weights_are_loaded_again(folder: Path) -> None:
    """As on a GPU, except for the memory itself, which only CUDA releases."""
    engine = make_engine(folder, sleeps=True)
    engine.load_weights(weights_of(folder), 0)
    whole = answers(engine, [ask(0)])[0]
    names = lambda: [name for name, *_ in engine._server.asked]  # noqa: E731
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert names()[-2:] == ["sleep", "wake"]
    engine.sleep()  # what is awake
    engine.load_weights(weights_of(folder), 1)
    assert names().count("wake") == 2  # the KV cache not yet
    assert answers(engine, [ask(0)])[0].token_ids.tolist() == whole.token_ids.tolist()
    assert names().count("wake") == 3


@real
def test_a_stop_string_is_found_across_decode_chunks(folder: Path) -> None:
    from transformers import AutoTokenizer

    engine = make_engine(folder, tokenizer=AutoTokenizer.from_pretrained(folder))
    engine.load_weights(weights_of(folder), 0)
    whole = answers(engine, [ask(0, 40)])[0].token_ids
    decode = engine._stops._tokenizer.decode
    last = next(
        k for k in range(4, 40) if decode(whole[k - 1 : k + 1]).isascii() and len(decode(whole[k - 1 : k + 1])) > 1
    )
    stop = decode(whole[last - 1 : last + 1])
    first = next(k for k in range(1, 41) if stop in decode(whole[:k]))
    for decode_chunk in (1, 3, 40):
        output = answers(engine, [ask(0, 40, stop=(stop,))], decode_chunk)[0]
        assert output.finish_reason is FinishReason.STOP and output.token_ids.tolist() == whole[:first].tolist()
        assert len(output.gen_logprobs) == len(output.versions) == first


@real
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, r"SGLang \(pid \d+, decode_chunk\) was ended by SIGKILL"),
        (signal.SIGSTOP, r"SGLang \(pid \d+, decode_chunk\) gave no answer for 2 s"),
    ],
)
def test_a_dead_or_hanging_scheduler_is_named(folder: Path, number: int, text: str) -> None:
    engine = make_engine(folder, start=own)
    engine.load_weights(iter(weights_of(folder)), 0)
    engine.add([ask(0, 40)])
    assert engine.step(8) == engine.step(4) == [] and engine.progress() == {0: 12}
    below = psutil.Process(engine._server._process.pid).children(recursive=True)
    (scheduler,) = [process for process in below if "sglang::scheduler" in process.cmdline()[0]]
    scheduler.send_signal(number)
    engine._server._call_s = 60.0 if number == signal.SIGKILL else 2.0
    with pytest.raises((RuntimeError, TimeoutError), match=text):
        answers(engine, [])
    engine.close()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive and not engine._server._process.is_alive()


@real
def test_a_refusal_by_sglang_is_reported_with_its_key_and_cause(folder: Path) -> None:
    """A refusal in SGLang's main process and one in its scheduler's process."""
    with pytest.raises(
        ValueError, match=r"SGLang refuses .* with generator\.sglang\.options=.*nonsense.*: .*'nonsense'"
    ):
        make_engine(folder, options={"nonsense": 1}, start=own)
    cause = r"ValueError: torch\.float32 is not supported for quantization method fp8"
    with pytest.raises(RuntimeError, match=rf"^SGLang \(pid \d+, starting\) was ended by SIGKILL: {cause}"):
        make_engine(folder, options={"quantization": "fp8"}, start=own)


@real
def test_sglangs_argument_names_are_found_in_its_source(folder: Path) -> None:
    found = fields("sglang", "srt/arg_groups/fields/*.py")
    assert {"attention_backend", "page_size", "max_total_tokens", "sampling_mask_max_tokens"} <= found


def planned(words: list[str], vocab_size: int = 151936) -> tuple[Config, Any]:
    sizes = {"vocab_size": vocab_size, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
    return load(["generator.engine=sglang", *words]), read_shape({"model_type": "qwen2", **sizes})


def test_only_the_first_rank_gets_the_weights_and_gets_them_whole() -> None:
    config, _ = planned([])
    need = GEN_ENGINES["sglang"].required_slices
    assert need(config, None, "w", (4, 6), 0, 2).slices == (((0, 4), (0, 6)),)
    assert need(config, None, "w", (4, 6), 1, 2).slices == ()


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
def test_settings_that_do_not_fit_the_model_are_refused(words: list[str], vocab_size: int, lines: list[str]) -> None:
    found = [problem.text for problem in check(*planned(words, vocab_size))]
    assert len(found) == len(lines) and all(text.startswith(line) for text, line in zip(found, lines, strict=True))


def test_a_mixture_with_a_tied_head_is_refused() -> None:
    config, _ = planned([])
    for tied, lines in ((False, 0), (True, 1)):
        spec = MODEL.model_copy(update={"architecture": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": tied})
        found = [problem.text for problem in check(config, read_shape(spec.hf_config()))]
        assert len(found) == lines and all("sglang cannot run qwen3_moe: its head is its emb" in text for text in found)


def test_the_plan_counts_the_configured_cache() -> None:
    assert cache(*planned(["generator.sglang.kv_cache_gib=2"])) == (2 << 30, 2 << 30)
    whole, least = cache(*planned(["generator.max_num_seqs=3"]))
    assert whole == 3 * least
