"""Router replay: the native generator records its experts, and the FSDP2 trainer chooses the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Outputs
from hpcrl.config import TrainerConfig
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.architecture import read_architecture
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.kv import block_bytes
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.rollout.batch import Batch, batch_from_samples
from hpcrl.rollout.types import Sample
from hpcrl.spec.trajectory import FIELDS, declare
from tests.engines.test_fsdp2 import worst_difference
from tests.engines.worlds import VOCAB, Weighted, make_batch, make_model_folder, norms_of, process_group

pytestmark = pytest.mark.numerics

SHAPE = RouteShape(num_layers=2, experts_per_token=2, num_experts=8)  # three layers, of which the second is dense
NONE = 255
EXPERTS = {"num_experts": SHAPE.num_experts, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8},
    "glm4_moe": {"num_experts_per_tok": 2, "num_hidden_layers": 3, "n_group": 4, "topk_group": 2},
}
"""Models of other families with routes of this shape."""
LENGTHS = (9, 12, 5, 9, 6, 8)


@pytest.fixture(autouse=True)
def field() -> None:
    declare(SHAPE.field)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder("qwen3_moe", tmp_path_factory.mktemp("moe") / "model", **EXPERTS)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group") / "world")):
        yield


def trainer_of(folder: Path, replay: bool = True, **own: Any) -> FSDP2Engine:
    config = TrainerConfig(lr=1e-3, logits_chunk_tokens=8)
    return FSDP2Engine(config, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=10, replay=replay)


def generated(
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    longer: int = 0,
    kv_cache_bytes: int | None = None,
) -> dict[int, Output]:
    """Responses of unequal length, more than slots, so that requests move between slots; two share a prompt."""
    engine = NativeEngine(
        folder,
        max_num_seqs=3,
        max_length=200,
        dtype=dtype,
        block_tokens=8,
        kv_cache_bytes=kv_cache_bytes,
        routes=SHAPE,
        load=weights is None,
    )
    if weights is not None:
        engine.load_weights(weights.items(), 0)
    engine.add([Request(i, prompt_of(i), SamplingParams(4 + 5 * (i % 4) + longer), seed=i) for i in range(8)])
    outputs: dict[int, Output] = {}
    while engine.progress():
        outputs |= {output.id: output for output in engine.step(5)}
    return outputs


def prompt_of(request: int) -> list[int]:
    return np.random.default_rng(request // 2).integers(0, VOCAB, 1 + request // 2).tolist()


def as_batch(outputs: dict[int, Output], prompt_of: Callable[[int], list[int]] = prompt_of) -> Batch:
    samples = []
    for number, output in sorted(outputs.items()):
        prompt = np.array(prompt_of(number), dtype=np.int32)
        before = len(prompt)
        samples.append(
            Sample(
                number << 24,
                output.finish_reason,
                token_ids=np.concatenate([prompt, output.token_ids]),
                loss_mask=np.arange(before + len(output.token_ids)) >= before,
                gen_logprobs=np.concatenate([np.zeros(before, np.float32), output.gen_logprobs]),
                versions=np.concatenate([np.full(before, -1, np.int32), output.versions]),
                turn_ids=np.where(np.arange(before + len(output.token_ids)) >= before, 0, -1).astype(np.int32),
                routes=np.concatenate([np.full((before, 4), NONE, np.uint8), output.columns["routes"]]),
            )
        )
    return batch_from_samples(samples, list(range(len(samples)))).check()


def differences(trainer: FSDP2Engine, batch: Batch) -> Tensor:
    """Absolute differences of log-probs of all response tokens, nats."""
    values = trainer.logprobs(batch, [list(range(batch.num_sequences))], 1.0)
    return (values - batch.gen_logprobs)[batch.loss_mask].abs()


def mismatch(trainer: FSDP2Engine, batch: Batch) -> float:
    return float(differences(trainer, batch).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "full"), [("qwen3_moe", False), ("qwen3_moe", True), *((family, False) for family in CHANGES)]
)
def test_recorded_routes_match_transformers(
    family: str, full: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' routers run on the whole sequence; with a full cache, requests are preempted."""
    if family in CHANGES:
        folder = make_model_folder(family, tmp_path / "model", **CHANGES[family])
    interrupted: list[int] = []
    interrupt = NativeEngine._preempt
    monkeypatch.setattr(NativeEngine, "_preempt", lambda self, slot: (interrupted.append(slot), interrupt(self, slot)))
    room = 25 * block_bytes(read_architecture(folder), 8, torch.float32)  # for one request of full length
    outputs = generated(folder, longer=100, kv_cache_bytes=room) if full else generated(folder)
    assert bool(interrupted) == full
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    for number, output in outputs.items():
        prompt, routes = prompt_of(number), output.columns["routes"]
        assert routes.dtype == np.uint8 and routes.shape == (len(output.token_ids), 4)
        seen.clear()
        model(torch.tensor([[*prompt, *output.token_ids.tolist()]]))
        whole = torch.stack(seen, dim=1).sort(-1).values  # [T, layers, k]
        before = whole[len(prompt) - 1 : -1]  # of the token before each token of the response
        assert torch.equal(torch.from_numpy(routes).long().unflatten(1, (2, 2)).sort(-1).values, before)


def test_a_request_that_has_not_begun_has_no_routes(folder: Path) -> None:
    engine = NativeEngine(folder, max_num_seqs=1, max_length=64, dtype=torch.float32, block_tokens=8, routes=SHAPE)
    engine.add([Request(i, [1, 2], SamplingParams(9), seed=i) for i in range(2)])
    engine.step(3)
    shapes = [output.columns["routes"].shape for output in engine.abort([0, 1])]
    assert shapes == [(3, 4), (0, 4)]
    plain = NativeEngine(folder, max_num_seqs=1, max_length=64, dtype=torch.float32, block_tokens=8)
    plain.add([Request(0, [1, 2], SamplingParams(2), seed=0)])
    assert plain.step(2)[0].columns == {}


def test_replay_brings_a_trainer_with_other_routers_closer_to_the_generator(folder: Path) -> None:
    """The generator's routers are noisy, more than rounding would make them."""
    weights = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    del weights["lm_head.weight"]
    noise = torch.Generator().manual_seed(0)
    weights |= {
        name: value + 0.05 * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
        if name.endswith("mlp.gate.weight")
    }
    batch = as_batch(generated(folder, weights))
    free, replayed = (mismatch(trainer_of(folder, replay), batch) for replay in (False, True))
    assert 0.0 < replayed < 0.7 * free, (free, replayed)


@pytest.mark.slow
def test_replay_prevents_different_experts_after_rounding_to_bf16(folder: Path) -> None:
    """A generator in bf16, a trainer in fp32: what differs most is where another expert was chosen."""
    batch = as_batch(generated(folder, dtype=torch.bfloat16, longer=100))
    free, replayed = (differences(trainer_of(folder, replay), batch) for replay in (False, True))
    assert replayed.mean() < free.mean() and replayed.max() < 0.5 * free.max()


@pytest.mark.parametrize("family", ["qwen3_moe", *CHANGES])
def test_with_equal_weights_only_wrong_routes_change_results(family: str, folder: Path, tmp_path: Path) -> None:
    """Also of models with a dense layer among their layers, or first."""
    if family in CHANGES:
        folder = make_model_folder(family, tmp_path / "model", **CHANGES[family])
    batch = as_batch(generated(folder))
    trainer = trainer_of(folder)
    assert mismatch(trainer, batch) < 1e-5
    batch.routes = batch.routes.roll(-1, 0)  # of the token after: an index that is off by one would show
    assert mismatch(trainer, batch) > 1e-3


def batch_without_routes() -> Batch:
    known = FIELDS.pop("routes")
    batch = make_batch(LENGTHS)
    FIELDS["routes"] = known
    return batch


def forced_batch() -> Batch:
    """Random routes, not the model's own; group members have the same ones for the prompt's last token."""
    batch, rng = batch_without_routes(), np.random.default_rng(3)
    routes = np.stack([rng.permutation(8)[:2] for _ in range(2 * batch.num_tokens)]).reshape(-1, 4).astype(np.uint8)
    routes[~batch.loss_mask.numpy()] = NONE
    starts = batch.cu_seqlens.tolist()
    for row in range(3, 6):
        routes[starts[row] + 3] = routes[starts[row - 3] + 3]
    routes[starts[1] + 5] = NONE  # not recorded: the trainer's own choice
    batch.routes = torch.from_numpy(routes)
    return batch.check()


def plain_results(folder: Path, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and gradients of Weighted with these routes, sequence by sequence, by transformers and autograd."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    state: dict[str, Tensor] = {}

    def route(layer: int, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, router.weight)
        probabilities = logits.softmax(-1)
        own = probabilities.topk(2).indices
        given = state["routes"][:, layer]
        chosen = torch.stack([own[i] if NONE in given[i] else given[i] for i in range(len(own))])
        picked = torch.stack([probabilities[i, chosen[i]] for i in range(len(own))])
        if router.norm_topk_prob:
            picked = picked / picked.sum(-1, keepdim=True)
        return logits, picked, chosen

    for layer, router in enumerate(routers):
        router.forward = functools.partial(route, layer, router)
    rows = []
    for ids, routes in zip(*(x.split(batch.lengths.tolist()) for x in (batch.token_ids, batch.routes)), strict=True):
        following = torch.cat([routes[1:], torch.full((1, 4), NONE)])
        state["routes"] = following.long().unflatten(1, (2, 2))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]]))
    values = torch.cat(rows) * batch.loss_mask
    loss, _ = Weighted().loss(Outputs(values), batch, norms_of(batch))
    loss.backward()
    return values.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "own",
    [{}, {"activation_checkpointing": True}, {"packing": "off"}, {"cpu_offload": True}],
    ids=["packed", "recomputed", "one by one", "sharded"],
)
def test_gradients_match_a_plain_model_with_the_same_experts(folder: Path, own: dict[str, Any]) -> None:
    batch = forced_batch()
    logprobs, gradients = plain_results(folder, batch)
    trainer = trainer_of(folder, **own)
    torch.testing.assert_close(trainer.logprobs(batch, [[4, 1], [0, 3, 2, 5]], 1.0), logprobs, rtol=0, atol=1e-5)
    trainer.accumulate(batch, [[4, 1], [0, 3, 2, 5], []], Weighted(), norms_of(batch))
    found = {name.removeprefix("hf."): p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    got = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    assert any("mlp.gate" in name for name in got)
    assert worst_difference(got, gradients) < 1e-4
    trainer.discard_gradients()
    free = trainer_of(folder, replay=False, **own).logprobs(batch, [[4, 1], [0, 3, 2, 5]], 1.0)
    assert (free - logprobs).abs().max() > 0.01  # these routes matter


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_replays_the_same_experts(folder: Path, stage: int) -> None:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine
    from tests.contracts.train import deepspeed

    batch, plan = forced_batch(), [[4, 1], [0, 3, 2, 5]]
    logprobs, gradients = plain_results(folder, batch)
    config, zero = TrainerConfig(lr=1e-3, logits_chunk_tokens=8), DeepSpeedConfig(zero_stage=stage)
    trainer = ZeroEngine(config, folder, zero=zero, dtype=torch.float32, total_steps=10, replay=True)
    torch.testing.assert_close(trainer.logprobs(batch, plan, 1.0), logprobs, rtol=0, atol=1e-5)
    found = deepspeed.gradients(trainer, batch, plan, Weighted(), norms_of(batch))
    assert worst_difference(found, gradients) < 1e-4


def test_unsupported_replay_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.router_replay: these rollouts have no routes"):
        trainer_of(folder).logprobs(batch_without_routes(), [[0]], 1.0)
    with pytest.raises(ValueError, match=r"trainer\.router_replay: qwen3 has no router that chooses experts; set it"):
        trainer_of(make_model_folder("qwen3", tmp_path / "dense"))


@pytest.mark.parametrize(
    ("num_experts", "dtype", "none"), [(255, "uint8", 255), (256, "int16", -1), (512, "int16", -1)]
)
def test_every_expert_number_fits_the_route_dtype(num_experts: int, dtype: str, none: int) -> None:
    field = RouteShape(94, 8, num_experts).field
    assert (field.dtype, field.fill, field.width) == (dtype, none, 752)
    assert none not in range(num_experts) and np.iinfo(dtype).max >= num_experts - 1
