"""Recurrent mixers over packed rows: which modules they are, and equal gradients with shared prefixes, recomputation,
and ranks that divide the rows. tests/engines/test_architectures.py has every family."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2 import trial
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.row_mixers import RowMixers, divide, mixers_of
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from tests.contracts.train.fsdp2 import gradients
from tests.engines.architectures import make_folder, tiny_config
from tests.engines.worlds import Weighted, make_batch, norms_of, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

LENGTHS = (9, 70, 7, 131, 33)
"""Of rows. Two are longer than the gated delta rule's chunk of 64 tokens."""
PLAN = [[0], [1, 2, 3, 4], []]
"""With two ranks, one has no row of the first micro-batch, and neither has one of the last."""
FAMILY = "qwen3_5_text"


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("qwen3_next", {"model.layers.0.linear_attn"}),
        ("lfm2", {"model.layers.0.conv"}),
        ("minimax", {"model.layers.1.self_attn"}),
        ("rwkv", {f"rwkv.blocks.{layer}.{part}" for layer in (0, 1) for part in ("attention", "feed_forward")}),
        ("gemma3", set()),
        ("whisper", set()),
    ],
)
def test_mixers_are_found_in_the_decoder(family: str, found: set[str]) -> None:
    with torch.device("meta"):
        assert mixers_of(AutoModelForCausalLM.from_config(tiny_config(family))).keys() == found


def test_rows_are_divided_by_their_tokens() -> None:
    assert divide([9, 5, 7, 1], 2) == [0, 1, 1, 0]
    assert divide([4], 3) == [0]


class Sums(torch.nn.Module):
    """A recurrence without parameters: the sum of the tokens so far, and a state."""

    def forward(self, tokens: Tensor, positions: Tensor, mask: None = None, **kernel: Any) -> tuple[Tensor, Tensor]:
        assert not kernel and (positions[:, 0] == 0).all() and mask is None
        return tokens.cumsum(1), tokens.sum(1)


def test_a_shared_prefix_is_computed_in_every_row_and_its_gradient_is_the_sum_over_rows() -> None:
    """Rows abx, aby and c, of which the first two share ab."""
    ids, lengths = torch.tensor([1, 2, 3, 1, 2, 4, 5]), [3, 3, 1]
    layout = PackedLayout(lengths, torch.device("cpu"), share_prefixes(ids, lengths))
    sums = Sums()
    mixers = RowMixers({"sums": sums})
    mixers.set_layout(layout)
    packed = ids[layout.kept].float()[None, :, None].requires_grad_()
    assert packed.flatten().tolist() == [1, 2, 3, 4, 5]
    out, state = sums(packed, positions=torch.tensor([[0, 1, 2, 2, 0]]), packed_layout=layout)
    assert out.flatten().tolist() == [1, 3, 6, 7, 5] and state is None
    out.sum().backward()
    assert packed.grad.flatten().tolist() == [4, 3, 1, 1, 1]  # a is in a, ab, abx and aby
    copied = copy.deepcopy(sums)
    assert copied.forward.own.__self__ is copied
    mixers.set_layout(None)
    assert sums(packed, torch.zeros(1, 5))[0].flatten().tolist() == [1, 3, 6, 10, 15]


# ---- engines


def gradients_of(folder: Path, by_layer: bool = False, **own: Any) -> dict[str, Tensor]:
    fsdp2.SMALL_MODEL_BYTES = 0 if by_layer else 4 << 30
    try:
        config = TrainerConfig(logits_chunk_tokens=16)
        trainer = FSDP2Engine(config, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=1)
    finally:
        fsdp2.SMALL_MODEL_BYTES = 4 << 30
    batch = make_batch(LENGTHS)
    assert batch.prefix_lengths().any()
    return gradients(trainer, batch, PLAN, Weighted(), norms_of(batch))


SETTINGS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2},
    "context, recomputed by layer": {"context_parallel": 2, "activation_checkpointing": True, "by_layer": True},
}


def on_two_ranks(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {name: gradients_of(folder, **settings) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_folder(FAMILY, tmp_path_factory.mktemp("model") / FAMILY)


@pytest.mark.slow
def test_packing_and_ranks_do_not_change_gradients(folder: Path, world_of_one: None) -> None:
    want = gradients_of(folder, packing="off")
    packed = gradients_of(folder, packing="require", activation_checkpointing=True)
    assert worst_difference(packed, want) < 1e-5
    for results in run_ranks(2, on_two_ranks, folder):
        for name in SETTINGS:
            assert worst_difference(results[name], want) < 1e-5, name


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_a_state_that_rows_share_is_noticed_in_an_untrained_model(
    family: str, tmp_path: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    monkeypatch.setattr(RowMixers, "set_layout", lambda *_: None)
    monkeypatch.setattr(trial, "_outcomes", {})  # of other tests
    with pytest.raises(ValueError, match=f"packing=require, but {family} cannot be packed: packed log-probs differ by"):
        gradients_of(tmp_path, packing="require")


@pytest.mark.slow
def test_with_zero_3_all_ranks_call_the_parts_of_a_mixer_equally_often(folder: Path, world_of_one: None) -> None:
    """Each call gathers weights, so with a number of calls that depends on a rank's rows, ranks would not match."""
    pytest.importorskip("deepspeed")
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    config, calls = TrainerConfig(logits_chunk_tokens=16), list[str]()
    given = {"dtype": torch.float32, "total_steps": 1, "trainable": False}
    for engine in (FSDP2Engine(config, folder, **given), ZeroEngine(config, folder, **given)):
        part = next(module for name, module in engine.model.named_modules() if name.endswith("linear_attn.out_proj"))
        part.register_forward_hook(lambda *_, name=engine.name: calls.append(name))
        engine.logprobs(make_batch(LENGTHS), [list(range(len(LENGTHS)))], 1.0)
    assert calls.count("fsdp2") == 4 and calls.count("deepspeed") == 1
