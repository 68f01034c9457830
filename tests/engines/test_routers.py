"""Routers of transformers' mixtures of experts: replayed choices against weights computed by hand."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.model_kind import CAUSAL
from hpcrl.engines.train.fsdp2.routers import ObservedRouter, named_routers, try_routers
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from tests.engines.architectures import tiny_config

pytestmark = pytest.mark.numerics


class Formula(NamedTuple):
    """Weights of chosen experts: scores of the logits, divided by their sum, times a scale."""

    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    changes: Mapping[str, Any] = MappingProxyType({})


GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
FORMULAS: dict[str, Formula] = {
    "qwen2_moe": Formula(normalised=False),
    "qwen3_moe": Formula(changes={"norm_topk_prob": True}),
    "qwen3_next": Formula(),
    "qwen3_5_moe_text": Formula(),
    "mixtral": Formula(),
    "gpt_oss": Formula(),
    "granitemoehybrid": Formula(),
    "ernie4_5_moe": Formula(),
    "hunyuan_v1_moe": Formula(),
    "jamba": Formula(normalised=False),
    "deepseek_v2": Formula(False, False, 1.5, GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": Formula(True, True, 1.5, GROUPS),
    "glm4_moe": Formula(True, True, 1.5, GROUPS),
    "glm4_moe_lite": Formula(True, True, 1.5, GROUPS),
    "glm_moe_dsa": Formula(True, False, 1.5, GROUPS | {"norm_topk_prob": False}),
    "minimax_m2": Formula(True),
    "lfm2_moe": Formula(True),
    "nemotron_h": Formula(True, True, 1.5, GROUPS),
}
SAMPLE = ("gpt_oss", "jamba", "deepseek_v2", "deepseek_v3", "granitemoehybrid", "minimax_m2")
"""One of every mechanism."""


def model_of(family: str, **changes: Any) -> Any:
    """A tiny model whose matrices and routers' biases are large enough to matter."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.ndim >= 2 and tensor.requires_grad:
                tensor.normal_(std=1.5 / tensor.shape[-1] ** 0.5)
            elif name.endswith(("correction_bias", "expert_bias", "router.bias")):
                tensor.normal_(std=0.3)
    return model


def by_hand(model: Any, formula: Formula, chosen: dict[str, Tensor]) -> None:
    """Give the experts these numbers, and weights from the formula on their inputs and the router's matrix."""

    def given(router: Any, numbers: Tensor, experts: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits = F.linear(inputs[0], *router)
        scores = logits.sigmoid() if formula.sigmoid else logits.softmax(-1)
        weights = torch.stack([scores[token, some] for token, some in enumerate(numbers)])
        if formula.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return inputs[0], numbers, weights * formula.scale

    modules = dict(model.named_modules())
    for name, numbers in chosen.items():
        parts = dict(modules[name].named_parameters())
        matrix = next(parts[key] for key in ("weight", "wg.weight", "router.weight") if key in parts)
        bias = parts.get("bias")
        block = modules[name] if hasattr(modules[name], "experts") else modules[name.rpartition(".")[0]]
        block.experts.register_forward_pre_hook(functools.partial(given, (matrix, bias), numbers))


def results(model: Any, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and gradients of a loss."""
    logprobs = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])
    model.zero_grad()
    (logprobs[:, 0] * torch.arange(len(tokens) - 1).cos()).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-4)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        most = float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-4 * most + 1e-8, msg=name)


@pytest.mark.parametrize(
    "family", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.soak) for name in FORMULAS]
)
def test_replayed_experts_have_the_weights_of_the_formula(family: str) -> None:
    """The model's own choice changes nothing; any other choice, also of groups that the router would not choose,
    equals the formula, with its gradients."""
    formula = FORMULAS[family]
    model = model_of(family, **formula.changes)
    tokens = torch.randperm(100)[:23]
    routers = {name: ObservedRouter(model.get_submodule(name), count) for name, count in named_routers(model)}
    wanted, own = results(model, tokens), dict[str, Tensor]()
    for name, router in routers.items():
        router.see_choice = functools.partial(own.__setitem__, name)
    results(model, tokens)
    assert own and own.keys() == routers.keys()
    generator = torch.Generator().manual_seed(5)
    others = {
        name: torch.rand(len(tokens), routers[name].num_experts, generator=generator).topk(some.shape[1]).indices
        for name, some in own.items()
    }
    mixed = {name: torch.where(torch.arange(len(tokens))[:, None] % 3 == 0, -1, some) for name, some in others.items()}
    for name, router in routers.items():
        router.see_choice, router.chosen = None, own[name]
    assert_same(results(model, tokens), wanted)
    for name, router in routers.items():
        router.chosen = others[name]
    found = results(model, tokens)
    assert (found[0] - wanted[0]).abs().max() > 1e-2
    plain = model_of(family, **formula.changes)
    by_hand(plain, formula, others)
    assert_same(found, results(plain, tokens))
    for name, router in routers.items():
        router.chosen, router.see_choice = mixed[name], functools.partial(own.__setitem__, name)
    found = results(model, tokens)
    plain = model_of(family, **formula.changes)
    by_hand(plain, formula, own)  # where -1: the router's own
    assert_same(found, results(plain, tokens))
    assert all(torch.equal(own[name][some >= 0], some[some >= 0]) for name, some in mixed.items())


def test_llama4_replays_its_dense_choice() -> None:
    """Its router yields a weight for every expert, which is zero for all but the chosen ones."""
    model = model_of("llama4_text")
    ((name, count), *_) = named_routers(model)
    router, module = ObservedRouter(model.get_submodule(name), count), model.get_submodule(name)
    states, chosen = torch.randn(7, module.in_features), torch.randint(0, count, (7, module.top_k))
    router.chosen = chosen
    weights, logits = module(states)
    wanted = torch.zeros(7, count).scatter(1, chosen, logits.gather(1, chosen).sigmoid())
    torch.testing.assert_close(weights, wanted)


def tried(family: str) -> Any:
    engine = SimpleNamespace(
        name="fsdp2",
        kind=CAUSAL,
        tried_class=PackedCausalLM,
        model_path=Path(family),
        own=FSDP2Config(),
        device=torch.device("cpu"),
    )
    return try_routers(engine, tiny_config(family))


def test_routers_are_found_by_layer_and_score() -> None:
    assert tried("deepseek_v3") == [("model.layers.1.mlp.gate", True)]  # the first layer is dense
    assert tried("nemotron_h") == [("model.layers.1.mixer.gate", True)]
    assert tried("jamba") == [("model.layers.1.feed_forward", False)]  # its router is only a matrix
    assert [sigmoid for _, sigmoid in tried("gpt_oss")] == [False, False]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3", "qwen3 has no router that chooses experts"),
        ("phimoe", "model.layers.0.mlp.router of phimoe does not choose by a single top-k"),  # sparsemixer
        ("deepseek_v4", "model.layers.0.mlp.gate of deepseek_v4 does not choose by a single top-k"),  # by tokens
        ("zaya", "model.layers.0.mlp.gate of zaya does not choose by a single top-k"),  # one expert more
        ("hy_v4", "hy_v4 computes whole layers row by row"),
    ],
)
def test_other_routers_are_refused(family: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tried(family)


def test_a_router_that_hides_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed expert outside the chosen groups would have the weight zero."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    def hiding(router: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(states.view(-1, router.hidden_dim), router.weight)
        scores = logits.softmax(-1)
        weights, chosen = torch.topk(scores * (scores > scores.mean(-1, keepdim=True)), k=router.top_k, dim=-1)
        return logits, weights, chosen

    monkeypatch.setattr(DeepseekV2TopkRouter, "forward", hiding)
    with pytest.raises(ValueError, match="has no scores of experts that it would not choose"):
        tried("deepseek_v2")
