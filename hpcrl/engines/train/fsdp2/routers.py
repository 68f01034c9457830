"""Routers of transformers' mixtures of experts: their logits and their choice of experts, observed and replaced.

A router's forward computes logits for all E experts by one linear layer, and chooses by one top-k of scores [T, E].
What it does before, between and after (softmax or sigmoid, biases, groups, norms, scales) is the model's own code,
which calls torch's functions. These calls are intercepted while a router's forward runs, so any such router is
supported.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.row_mixers import mixers_of
from hpcrl.engines.train.fsdp2.small_model import small_model
from hpcrl.engines.train.fsdp2.trial import (
    AFTER,
    LENGTHS,
    PREFIX,
    SEEN,
    TOLERANCE,
    Tried,
    deviation,
    make_rows,
    one_line,
)
from hpcrl.models.families import read_shape

OWN_CLASS = re.compile(r"(Router|Gate|Gating)$")
"""Classes of routers. If a block of experts has none, it chooses itself."""


class FoundRouter(NamedTuple):
    """A router's name in the model, and whether its scores are sigmoids or a softmax (None: neither)."""

    name: str
    sigmoid: bool | None


class ObservedRouter:
    """Intercepts a router's forward passes.

    Attributes:
        chosen: int64 [T, k], experts to use instead of its own choice, -1: its own; None: its own for all tokens.
        see_logits: Gets the logits [T, E], and returns the logits to use.
        see_choice: Gets the experts that are used, int64 [T, k].
        calls: Names of the intercepted functions, if a list.
        hides: Whether an expert to use had no score, noted with `calls`.
    """

    def __init__(self, module: Any, num_experts: int):
        self.num_experts = num_experts
        self.chosen: Tensor | None = None
        self.see_logits: Callable[[Tensor], Tensor] | None = None
        self.see_choice: Callable[[Tensor], None] | None = None
        self.calls: list[str] | None = None
        self.hides = False
        module.forward = functools.partial(self._run, module.forward)

    def _run(self, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if self.chosen is None and self.see_logits is None and self.see_choice is None and self.calls is None:
            return forward(*inputs, **named)
        with _Interception(self):
            return forward(*inputs, **named)

    def replaced(self, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """(scores, numbers) of the experts to use. The scores are differentiable."""
        assert self.chosen is not None
        if self.chosen.shape != own.shape:
            raise ValueError(
                f"trainer.router_replay: these rollouts have {self.chosen.shape[-1]} experts per token, and the model "
                f"chooses {own.shape[-1]}; set it to false"
            )
        chosen = torch.where(self.chosen < 0, own, self.chosen)
        values = scores.gather(-1, chosen)
        if self.calls is not None:
            self.hides |= bool(((values == 0.0) | ~values.isfinite()).any())
        return values, chosen

    def visible(self, mask: Tensor) -> Tensor:
        """A mask of experts that are not to be chosen, bool [T, E], without those that are used anyway."""
        assert self.chosen is not None
        used = mask.new_zeros(len(mask), self.num_experts + 1)
        used.scatter_(1, torch.where(self.chosen < 0, self.num_experts, self.chosen), True)
        return mask & ~used[:, :-1]


class _Interception(TorchFunctionMode):
    """Active during one forward pass of a router."""

    def __init__(self, router: ObservedRouter):
        super().__init__()
        self._router, self._logits_seen = router, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, router = getattr(func, "__name__", ""), self._router
        if name in ("masked_fill", "masked_fill_") and router.chosen is not None and self._of_experts(args[0]):
            args = (args[0], router.visible(args[1]), *args[2:])
        result = func(*args, **(kwargs or {}))
        if name == "linear" and not self._logits_seen and result.shape[-1] == router.num_experts:
            self._note("linear")
            self._logits_seen = True
            if router.see_logits is not None:
                result = router.see_logits(result)
        elif name == "topk" and self._of_experts(args[0]):
            self._note("topk")
            if router.chosen is not None:
                result = torch.return_types.topk(router.replaced(args[0], result[1]))  # type: ignore[attr-defined]
            if router.see_choice is not None:
                router.see_choice(result[1])
        elif name in ("softmax", "sigmoid"):
            self._note(name)
        return result

    def _of_experts(self, scores: Any) -> bool:
        return isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[-1] == self._router.num_experts

    def _note(self, name: str) -> None:
        if self._router.calls is not None:
            self._router.calls.append(name)


def named_routers(hf: nn.Module) -> Iterator[tuple[str, int]]:
    """(name, number of experts) of the modules in which a model chooses experts, by layer."""
    for name, block in hf.named_modules():
        stacks = [child for child in block.children() if type(child).__name__.endswith("Experts")]
        counts = [p.shape[0] for stack in stacks for p in stack.parameters(recurse=False) if p.ndim >= 3]
        if counts:
            own = [key for key, child in block.named_children() if OWN_CLASS.search(type(child).__name__)]
            yield (f"{name}.{own[0]}" if len(own) == 1 else name), counts[0]


def try_routers(engine: Tried, config: PreTrainedConfig) -> list[FoundRouter]:
    """The routers of this config's model, by layer, whose logits and choices can be intercepted. A small model tries
    it before weights are read: replaying a router's own choice in another order changes nothing, and other experts are
    used as chosen. ValueError, without the key, if this is not so."""
    kind = config.model_type
    try:
        hf = small_model(config, engine.kind, engine.device)
        model = engine.tried_class(hf, 64)
        model.set_packing(False)
        row = make_rows(model, LENGTHS, PREFIX, engine.device, AFTER)[0][-1]
    except Exception as error:  # an error of a model's own code
        raise ValueError(f"no small model of {kind} can be tried: {one_line(error)}") from error
    routers = {name: ObservedRouter(hf.get_submodule(name), count) for name, count in named_routers(hf)}
    if not routers:
        raise ValueError(f"{kind} has no router that chooses experts")
    if any(router.startswith(f"{mixer}.") for router in routers for mixer in mixers_of(hf)):
        raise ValueError(f"{kind} computes whole layers row by row, so its routers do not see packed tokens")
    try:
        return _try(kind, model, row, routers)
    except RuntimeError as error:
        raise ValueError(f"the routers of {kind} fail with other experts: {one_line(error)}") from error


@torch.no_grad()
def _try(kind: str, model: PackedCausalLM, row: Tensor, routers: dict[str, ObservedRouter]) -> list[FoundRouter]:
    own: dict[str, Tensor] = {}
    for name, router in routers.items():
        router.calls, router.see_choice = [], functools.partial(own.__setitem__, name)
    wanted = model.own_logprobs(row)
    found = []
    for name, router in routers.items():
        calls, router.see_choice = router.calls or [], None
        if calls.count("topk") != 1 or calls[:1] != ["linear"]:
            raise ValueError(f"{name} of {kind} does not choose by a single top-k of a linear layer's scores")
        scores = {"softmax", "sigmoid"} & set(calls)
        found.append(FoundRouter(name, None if len(scores) != 1 else scores == {"sigmoid"}))
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.rand(len(row), routers[name].num_experts, generator=generator).topk(experts.shape[1]).indices
        for name, experts in own.items()
    }
    others = {name: experts.to(row.device) for name, experts in drawn.items()}
    first = _replayed(model, row, routers, others)
    for name, router in routers.items():
        router.calls = None
        if router.hides:
            raise ValueError(f"{name} of {kind} has no scores of experts that it would not choose")
    same = _replayed(model, row, routers, {name: experts.flip(1) for name, experts in own.items()})
    again = _replayed(model, row, routers, {name: experts.flip(1) for name, experts in others.items()})
    if max(deviation(same, wanted), deviation(again, first)) > TOLERANCE or deviation(first, wanted) < SEEN:
        raise ValueError(f"the routers of {kind} weight experts by more than their scores")
    return found


def _replayed(
    model: PackedCausalLM, row: Tensor, routers: dict[str, ObservedRouter], chosen: dict[str, Tensor]
) -> Tensor:
    for name, router in routers.items():
        router.chosen = chosen[name]
    return model.own_logprobs(row)


class RouterTable(NamedTuple):
    """A model's routers, by layer, and the numbers of their choices."""

    found: list[FoundRouter]
    shape: RouteShape

    def of(self, hf: nn.Module) -> list[ObservedRouter]:
        """The routers of `hf`, to be intercepted from now on."""
        return [ObservedRouter(hf.get_submodule(router.name), self.shape.num_experts) for router in self.found]


def router_table(engine: Tried, config: PreTrainedConfig) -> RouterTable:
    """The routers of the engine's folder. ValueError as in try_routers(), or if they are not those of the layers with
    experts that generators record."""
    found = try_routers(engine, config)
    shape = RouteShape.of(read_shape(json.loads((engine.model_path / "config.json").read_text())))
    if len(found) != shape.num_layers:
        raise ValueError(f"{config.model_type} has {len(found)} routers in {shape.num_layers} layers with experts")
    return RouterTable(found, shape)
