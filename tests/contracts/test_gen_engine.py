"""The contract of generation engines (hpcrl/engines/gen/generation_engine.py), checked on each engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import (
    GenEngine,
    Output,
    ReadsBackWeights,
    Request,
    SamplingParams,
    SharesWeights,
)
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import Medium
from hpcrl.spec.tables import GEN_ENGINES
from tests.contracts import factories
from tests.contracts.gen import MAX_LENGTH, VOCAB, Engines, NamedWeights

pytestmark = pytest.mark.numerics

FACTORIES, MISSING = factories("gen", GEN_ENGINES)


def test_every_engine_has_a_contract_factory() -> None:
    assert not MISSING, "; ".join(MISSING)


def slow_if_extra(name: str) -> object:
    """The engines of an extra take seconds to build, and SGLang is in an environment of its own."""
    marks = [pytest.mark.slow, pytest.mark.timeout(300)] if GEN_ENGINES[name].needs else []
    return pytest.param(name, marks=[*marks, pytest.mark.outside] if name == "sglang" else marks)


@pytest.fixture(scope="module", params=map(slow_if_extra, FACTORIES))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines: Engines = FACTORIES[request.param](tmp_path_factory.mktemp(request.param))
    yield engines
    engines.close()


def ask(request_id: int, new: int = 6, *, prompt: int = 5, **params: object) -> Request:
    """A request of a fixed length unless the parameters say otherwise."""
    sampling = SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **params})
    return Request(request_id, [(7 * request_id + k) % VOCAB for k in range(prompt)], sampling, seed=request_id)


def drain(engine: GenEngine, burst: int = 4) -> dict[int, Output]:
    outputs = {}
    while engine.progress():
        for output in engine.step(burst):
            assert output.id not in outputs
            outputs[output.id] = output
    return outputs


def check_shape(output: Output, request: Request) -> None:
    count = len(output.token_ids)
    assert count <= request.params.max_new_tokens
    assert output.token_ids.dtype == output.versions.dtype == np.int32
    assert output.gen_logprobs.dtype == np.float32
    assert len(output.gen_logprobs) == len(output.versions) == count
    assert all(len(column) == count for column in output.columns.values())
    assert np.isfinite(output.gen_logprobs).all() and (output.gen_logprobs <= 0).all()
    assert (output.token_ids >= 0).all() and (output.token_ids < VOCAB).all()
    assert (output.gen_logprobs_behaviour is not None) == request.params.truncates
    if output.gen_logprobs_behaviour is not None:
        assert output.gen_logprobs_behaviour.dtype == np.float32
        assert len(output.gen_logprobs_behaviour) == count


def same(a: Output, b: Output) -> bool:
    return (
        a.finish_reason == b.finish_reason
        and np.array_equal(a.token_ids, b.token_ids)
        and np.allclose(a.gen_logprobs, b.gen_logprobs, atol=1e-5)
    )


def test_every_request_ends_once_with_arrays_of_its_length(engines: Engines) -> None:
    engine = engines.build(3, True)
    requests = [ask(i, 1 + 3 * i % 11, prompt=1 + i % 7, top_k=5 * (i % 2)) for i in range(10)]
    engine.add(requests[:4])
    outputs = {o.id: o for o in engine.step(2)}
    engine.add(requests[4:])
    outputs |= drain(engine)
    assert outputs.keys() == set(range(10)) and not engine.progress()
    for request in requests:
        output = outputs[request.id]
        check_shape(output, request)
        assert len(output.token_ids) == request.params.max_new_tokens
        assert output.finish_reason is FinishReason.LENGTH
        assert (output.versions == engine.version).all()


def test_a_step_generates_its_tokens_for_as_many_requests_as_there_are_slots(engines: Engines) -> None:
    engine = engines.build(2, True)
    assert engine.max_num_seqs == 2
    engine.add([ask(0, 9), ask(1, 9), ask(2, 9)])
    assert engine.progress() == {0: 0, 1: 0, 2: 0}
    assert engine.step(4) == [] and engine.progress() == {0: 4, 1: 4, 2: 0}
    assert [o.id for o in engine.step(6)] == [0, 1] and engine.progress() == {2: 1}
    assert [len(o.token_ids) for o in engine.step(100)] == [9]
    assert engine.step(5) == []


def test_outputs_are_ordered_by_finish_and_then_by_slot(engines: Engines) -> None:
    engine = engines.build(4, True)
    engine.add([ask(0, 5), ask(1, 2), ask(2, 5), ask(3, 2)])
    assert [o.id for o in engine.step(3)] == [1, 3]
    assert sorted(o.id for o in engine.step(3)) == [0, 2]


def test_impossible_requests_are_refused_by_id_and_nothing_is_queued(engines: Engines) -> None:
    engine = engines.build(2, True)
    engine.add([ask(1, 30)])
    engine.step(1)
    bad = {
        "max_length": ask(5, MAX_LENGTH),
        "empty": Request(5, [], SamplingParams(4), seed=0),
        "vocabulary": Request(5, [1, VOCAB], SamplingParams(4), seed=0),
        "max_new_tokens": ask(5, 0),
        "temperature": ask(5, temperature=-1.0),
        "top_p": ask(5, top_p=0.0),
        "top_k": ask(5, top_k=-1),
        "min_p": ask(5, min_p=1.5),
        "seed": Request(5, [1], SamplingParams(4), seed=-1),
        "medium of kind odour": replace(ask(5), media=(Medium("odour", b"x"),)),
        "already in use": ask(1),
    }
    for words, request in bad.items():
        with pytest.raises(ValueError, match=rf"request {request.id}: .*{words}"):
            engine.add([ask(4), request])
        assert engine.progress().keys() == {1}
    with pytest.raises(ValueError, match=r"request 6: .*in use"):
        engine.add([ask(6), ask(6)])
    engine.add([ask(5, MAX_LENGTH - 5)])  # exactly fits
    assert len(drain(engine)[5].token_ids) == MAX_LENGTH - 5


def test_abort_returns_partial_outputs_in_the_requested_order(engines: Engines) -> None:
    engine = engines.build(3, True)
    requests = [ask(i, 12, top_p=0.9 if i % 2 else 1.0) for i in range(5)]
    engine.add(requests)
    whole = drain(engine)
    engine.add(requests)
    engine.step(5)
    aborted = engine.abort([4, 99, 1, 1])
    assert [o.id for o in aborted] == [4, 1]
    assert [len(o.token_ids) for o in aborted] == [0, 5]
    assert all(o.finish_reason is FinishReason.ABORT for o in aborted)
    for output in aborted:
        check_shape(output, requests[output.id])
        assert np.array_equal(output.token_ids, whole[output.id].token_ids[:5][: len(output.token_ids)])
    assert engine.progress().keys() == {0, 2, 3}
    engine.add([requests[1]])  # the id is free again
    rest = drain(engine)
    assert all(same(rest[i], whole[i]) for i in (0, 1, 2, 3))
    assert engine.abort([0, 1]) == []


def test_a_response_depends_only_on_its_request(engines: Engines) -> None:
    requests = [ask(i, 8, top_k=3 * (i % 3), temperature=1.0 - i % 2 / 4) for i in range(6)]
    together, apart = engines.build(6, True), engines.build(2, True)
    together.add(requests)
    apart.add(requests[::-1])
    first, second = drain(together), drain(apart, burst=1)
    assert all(same(first[i], second[i]) for i in range(6))
    other_seed = Request(9, requests[0].prompt_ids, requests[0].params, seed=77)
    together.add([other_seed])
    assert not np.array_equal(drain(together)[9].token_ids, first[0].token_ids)


def test_prefixes_shared_with_other_requests_change_no_response(engines: Engines) -> None:
    """More group members than slots, and next turns, which begin with a prompt and its response."""
    engine, fresh = engines.build(3, True), engines.build(1, True)
    prompt = [(11 * k) % VOCAB for k in range(19)]
    params = SamplingParams(7, ignore_eos=True)
    turns = [Request(i, prompt, params, seed=i, continues=True) for i in range(5)]
    for _ in range(2):
        engine.add(turns)
        together = drain(engine)
        for request in turns:
            fresh.sleep()
            fresh.load_weights(engines.weights, version=0)
            fresh.add([request])
            assert same(drain(fresh)[request.id], together[request.id])
        turns = [
            Request(r.id, [*r.prompt_ids, *together[r.id].token_ids.tolist(), 5, 6], params, 50 + r.id) for r in turns
        ]


def test_new_weights_leave_no_trace_of_the_old_ones(engines: Engines) -> None:
    """A prompt that was served before gets the response of the new weights."""
    engine, fresh = engines.build(2, True), engines.build(2, False)
    engine.add([ask(0, prompt=30)])
    drain(engine)
    changed = [(name, tensor * 1.5) for name, tensor in engines.weights]
    for each in (engine, fresh):
        each.load_weights(changed, version=1)
        each.add([ask(0, prompt=30)])
    assert same(drain(engine)[0], drain(fresh)[0])


def test_a_stop_id_ends_the_response_and_is_part_of_it(engines: Engines) -> None:
    engine = engines.build(2, True)
    engine.add([ask(0, 20)])
    ids = drain(engine)[0].token_ids
    last = next(k for k in range(3, 20) if ids[k] not in ids[:k])
    engine.add([ask(0, 20, stop_token_ids=(int(ids[last]), VOCAB - 1))])
    stopped = drain(engine)[0]
    assert stopped.finish_reason is FinishReason.STOP and np.array_equal(stopped.token_ids, ids[: last + 1])


def test_tokens_carry_the_weight_version_that_produced_them(engines: Engines) -> None:
    engine = engines.build(1, True)
    engine.add([ask(0, 7), ask(1, 3)])
    assert engine.version == 0
    engine.step(3)
    engine.load_weights(engines.weights, version=4)
    engine.step(2)
    engine.load_weights(iter(engines.weights), version=5)
    outputs = drain(engine)
    assert engine.version == 5
    assert outputs[0].versions.tolist() == [0, 0, 0, 4, 4, 5, 5] and outputs[1].versions.tolist() == [5, 5, 5]


def test_bad_weights_change_nothing(engines: Engines) -> None:
    engine = engines.build(1, True)
    engine.add([ask(0, 8)])
    whole = drain(engine)[0]
    engine.add([ask(0, 8)])
    engine.step(4)
    wrecked: NamedWeights = [(name, torch.zeros_like(tensor)) for name, tensor in engines.weights]
    name, tensor = wrecked[-2]
    cases = {
        "no_such_weight": [*wrecked, ("no_such_weight", torch.zeros(1))],
        "missing": wrecked[1:],
        "shape": [*wrecked[:-2], (name, torch.zeros(*tensor.shape, 1)), wrecked[-1]],
    }
    for words, named in cases.items():
        with pytest.raises(ValueError, match=words):
            engine.load_weights(named, version=9)
        assert engine.version == 0
    with pytest.raises(ValueError, match="version"):
        engine.load_weights(engines.weights, version=-1)
    assert same(drain(engine)[0], whole)


def test_an_engine_has_no_weights_after_their_iterator_fails(engines: Engines) -> None:
    engine = engines.build(1, True)
    engine.add([ask(0, 8)])
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights(iter(engines.weights[1:]), version=1)
    assert engine.version == -1
    with pytest.raises(ValueError, match="load_weights"):
        engine.step(1)
    engine.load_weights(engines.weights, version=1)
    assert (drain(engine)[0].versions == 1).all()


def test_weights_are_copied_before_the_next_ones_overwrite_them(engines: Engines) -> None:
    """As they come from other ranks: full tensors, one after another, in one memory."""
    engine, loaded = engines.build(1, False), engines.build(1, True)
    memory = torch.empty(max(tensor.nbytes for _, tensor in engines.weights), dtype=torch.uint8)

    def overwritten() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in engines.weights:
            view = memory.fill_(0x55)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield name, view.copy_(tensor)
        memory.fill_(0x55)

    engine.load_weights(overwritten(), version=0)
    for each in (engine, loaded):
        each.add([ask(0, 8)])
    assert same(drain(engine)[0], drain(loaded)[0])


def test_weights_exposed_by_an_engine_equal_the_loaded_ones(engines: Engines) -> None:
    engine = engines.build(1, True)
    if not isinstance(engine, ReadsBackWeights):
        return  # they are checked while loading
    given = dict(engines.weights)
    shown = {name: tensor.clone() for name, tensor in engine.loaded_weights(given)}
    assert shown.keys() == given.keys()
    assert all(torch.equal(shown[name], tensor) for name, tensor in given.items())


def test_weights_can_be_loaded_after_construction(engines: Engines) -> None:
    engine, loaded = engines.build(2, False), engines.build(2, True)
    assert engine.version == -1 and engine.step(1) == []
    for each in (engine, loaded):
        each.add([ask(0), ask(1)])
    with pytest.raises(ValueError, match="load_weights"):
        engine.step(1)
    engine.load_weights(engines.weights, version=3)
    assert engine.version == 3
    first, second = drain(engine), drain(loaded)
    assert all(same(first[i], second[i]) for i in (0, 1))


def test_sleep_requires_an_idle_engine_and_wake_requires_weights(engines: Engines) -> None:
    engine = engines.build(2, True)
    engine.add([ask(0)])
    engine.step(2)
    with pytest.raises(ValueError, match="running"):
        engine.sleep()
    whole = drain(engine)[0]
    engine.sleep()
    engine.sleep()
    assert engine.version == -1
    engine.wake()
    engine.load_weights(engines.weights, version=1)
    engine.sleep()  # nothing was generated with them
    engine.wake()
    engine.add([ask(0)])
    with pytest.raises(ValueError, match="load_weights"):
        engine.step(1)
    engine.load_weights(engines.weights, version=2)
    assert same(drain(engine)[0], whole)


def test_shared_weights_are_read_in_place(engines: Engines) -> None:
    engine, loaded = engines.build(2, False), engines.build(2, True)
    if not isinstance(engine, SharesWeights):  # an ability, not a duty
        return
    own, given = engine.share_weights(), dict(engines.weights)
    assert own and all(tensor.is_contiguous() and not tensor.is_inference() for tensor in own.values())
    mine = {name: own[name].copy_(tensor) if name in own else tensor for name, tensor in given.items()}
    engine.load_weights(mine.items(), version=4)
    if isinstance(engine, ReadsBackWeights):
        assert all(torch.equal(shown, given[name]) for name, shown in engine.loaded_weights(given))
    for each in (engine, loaded):
        each.add([ask(0), ask(1)])
    first, second = drain(engine), drain(loaded)
    for i in (0, 1):
        assert (first[i].versions == 4).all() and (first[i].token_ids == second[i].token_ids).all()
        np.testing.assert_allclose(first[i].gen_logprobs, second[i].gen_logprobs, rtol=0, atol=1e-4)
    name = max(own.keys() & given.keys(), key=lambda name: own[name].numel())
    own[name].mul_(-1.0)  # without another load: the memory is shared
    engine.add([ask(0)])
    assert not np.allclose(drain(engine)[0].gen_logprobs, first[0].gen_logprobs, rtol=0, atol=1e-3)
    own[name].mul_(-1.0)
    engine.sleep()
    engine.wake()
    engine.load_weights(mine.items(), version=5)
    engine.add([ask(0)])
    assert same(replace(drain(engine)[0], versions=first[0].versions), first[0])


def test_close_drops_everything(engines: Engines) -> None:
    engine = engines.build(1, True)
    engine.add([ask(0), ask(1)])
    engine.step(2)
    engine.close()
    assert engine.progress() == {}


def test_an_engine_with_routes_returns_them_in_every_output(engines: Engines, request: pytest.FixtureRequest) -> None:
    """Also outputs of aborted requests and of one that has not begun."""
    name = request.node.callspec.params["engines"]
    assert (engines.recording is not None) == GEN_ENGINES[name].records_routes
    if engines.recording is None:
        return
    engine, shape = engines.recording()
    engine.add([ask(0, 3), ask(1, 9), ask(2, 5)])
    outputs = {output.id: output for output in [*engine.step(3), *engine.abort([1, 2])]}
    assert [len(outputs[i].token_ids) for i in range(3)] == [3, 3, 0]
    for output in outputs.values():
        routes = output.columns["routes"]
        assert routes.dtype == shape.field.travels_as and routes.shape == shape.field.shape(len(output.token_ids))
        assert ((routes >= 0) & (routes < shape.num_experts)).all()
        chosen = np.sort(routes.reshape(-1, shape.num_layers, shape.experts_per_token), axis=-1)
        assert (np.diff(chosen, axis=-1) > 0).all(), "each expert once"
