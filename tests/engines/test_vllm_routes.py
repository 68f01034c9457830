"""Router replay from vLLM: it records the experts that the model and the native engine choose, whatever its scheduler
does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import GenEngine, Output, Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.vllm.routes import RouteRecorder
from hpcrl.spec.trajectory import declare
from tests.contracts.gen.vllm import leave_groups
from tests.engines.test_fsdp2 import worst_difference
from tests.engines.test_replay import as_batch, trainer_of
from tests.engines.worlds import VOCAB, Weighted, make_model_folder, norms_of

# find_spec rather than importorskip: collecting must not pay for importing vLLM
pytestmark = [
    pytest.mark.slow,
    pytest.mark.numerics,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]

SHAPE = RouteShape(num_layers=2, experts_per_token=2, num_experts=8)  # three layers, of which the second is dense
SIZES: dict[str, Any] = {
    "num_experts": SHAPE.num_experts,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 32,
}
PROMPT = 70  # more than two of vLLM's blocks here
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder("qwen3_moe", tmp_path_factory.mktemp("moe") / "model", **SIZES)


@pytest.fixture(scope="module")
def versions(folder: Path) -> list[Weights]:
    """The weights of the folder, and others."""
    weights = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    del weights["lm_head.weight"]
    noise = torch.Generator().manual_seed(0)
    return [weights, {name: w + 0.05 * torch.randn(w.shape, generator=noise) for name, w in weights.items()}]


def vllm(folder: Path, blocks: int = 64, **options: Any) -> GenEngine:
    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    return VLLMEngine(
        folder,
        max_num_seqs=3,
        max_length=200,
        dtype="float32",
        cache_bytes=blocks * 3 * 2 * 32 * 32 * 4,  # layers, keys and values, tokens, numbers per token, bytes
        routes=SHAPE,
        options={"block_size": 32, **options},
        load=False,
    )


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = f"file://{tmp_path_factory.mktemp('group') / 'world'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    leave_groups()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[GenEngine]:
    engine = vllm(folder)
    yield engine
    engine.close()


def native(folder: Path) -> GenEngine:
    return NativeEngine(
        folder, max_num_seqs=3, max_length=200, dtype=torch.float32, block_tokens=8, routes=SHAPE, load=False
    )


def prompt_of(request: int) -> list[int]:
    """Two requests share a prompt."""
    return np.random.default_rng(request // 2).integers(0, VOCAB, PROMPT + request // 2).tolist()


def requests(longer: int = 0) -> list[Request]:
    return [Request(i, prompt_of(i), SamplingParams(8 + 5 * (i % 4) + longer), seed=i) for i in range(8)]


def drained(engine: GenEngine) -> dict[int, Output]:
    outputs: dict[int, Output] = {}
    while engine.progress():
        outputs |= {output.id: output for output in engine.step(5)}
    return outputs


def chosen(output: Output) -> Tensor:
    """[n, layers, experts per token], sorted: engines may order equally good ones differently."""
    return torch.from_numpy(output.columns["routes"]).long().unflatten(1, (2, 2)).sort(-1).values


def model_choices(model: Any, prompt: Sequence[int], output: Output) -> Tensor:
    """The experts that transformers' routers choose on the whole sequence, for the token before each response token."""
    seen: list[Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [r.register_forward_hook(lambda _, __, output: seen.append(output[2])) for r in routers]
    with torch.no_grad():
        model(torch.tensor([[*prompt, *output.token_ids.tolist()]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).sort(-1).values[len(prompt) - 1 : -1]


def test_recorded_routes_match_transformers(
    folder: Path, versions: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts computed in pieces or taken from the cache, and requests preempted for lack of blocks, after an
    update."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    cached: list[int] = []
    preempted: list[Any] = []
    look_up, preempt = KVCacheManager.get_computed_blocks, Scheduler._preempt_request

    def get_computed_blocks(self: Any, request: Any) -> Any:
        found = look_up(self, request)
        cached.append(found[1])
        return found

    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", get_computed_blocks)
    monkeypatch.setattr(Scheduler, "_preempt_request", preempt_request)
    engine: Any = vllm(folder, blocks=8, max_num_batched_tokens=48)
    engine.load_weights(versions[1].items(), 0)
    engine.load_weights(versions[0].items(), 1)
    asked = requests(longer=25)
    engine.add(asked)
    outputs = drained(engine)
    with pytest.raises(ValueError, match=r"trainer\.router_replay: vLLM has 2 layers .* config\.json has 5"):
        RouteRecorder(RouteShape(5, 2, 8))._bind(engine._runner)
    engine.close()
    assert max(cached) >= 64 and preempted
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in asked:
        output = outputs[request.id]
        assert len(output.token_ids) == request.params.max_new_tokens
        assert torch.equal(chosen(output), model_choices(model, request.prompt_ids, output))


def script(engine: GenEngine, versions: list[Weights], on_new_weights: str) -> dict[int, Output]:
    """New weights while requests run; one of these is aborted later, as are two that have not begun."""
    engine.load_weights(versions[0].items(), 0)
    engine.add(requests())
    outputs = {output.id: output for output in engine.step(4)}
    engine.load_weights(versions[1].items(), 1)
    if on_new_weights == "recompute":
        engine.recompute()
    outputs |= {output.id: output for output in [*engine.step(3), *engine.abort([2, 6, 7])]}
    return outputs | drained(engine)


@pytest.mark.parametrize("on_new_weights", ["continue", "recompute"])
def test_responses_and_routes_match_the_native_engine_across_updates(
    engine: GenEngine, on_new_weights: str, folder: Path, versions: list[Weights]
) -> None:
    found, wanted = (script(each, versions, on_new_weights) for each in (engine, native(folder)))
    assert found.keys() == wanted.keys() == set(range(8))
    assert [len(found[i].token_ids) for i in (2, 6, 7)] == [7, 0, 0]
    for i, output in wanted.items():
        np.testing.assert_array_equal(found[i].token_ids, output.token_ids)
        np.testing.assert_array_equal(found[i].versions, output.versions)
        np.testing.assert_allclose(found[i].gen_logprobs, output.gen_logprobs, rtol=0, atol=1e-4)
        assert torch.equal(chosen(found[i]), chosen(output)), i
    assert found[2].versions.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_training_with_vllm_routes_matches_training_with_native_routes(
    engine: GenEngine, folder: Path, versions: list[Weights]
) -> None:
    """The generators' weights differ from the trainer's, so replay matters."""
    declare(SHAPE.field)
    rows, results = [[0, 1, 2, 3], [4, 5, 6, 7]], []
    for generator in (engine, native(folder)):
        generator.load_weights(versions[1].items(), 2)
        generator.add(requests())
        batch, trainer = as_batch(drained(generator), prompt_of), trainer_of(folder)
        logprobs = trainer.logprobs(batch, rows, 1.0)
        trainer.accumulate(batch, rows, Weighted(), norms_of(batch))
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
        results.append((batch.token_ids, logprobs, gradients))
    (ids, logprobs, gradients), (wanted_ids, wanted, wanted_gradients) = results
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-5)
    assert any("mlp.gate" in name for name in gradients)
    assert worst_difference(gradients, wanted_gradients) < 1e-4
    free = trainer_of(folder, replay=False).logprobs(batch, rows, 1.0)
    assert (free - logprobs)[batch.loss_mask].abs().max() > 0.01  # these routes matter
