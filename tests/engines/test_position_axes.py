"""Position ids of three axes in the training engines: passed to the model unchanged, or refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.rollout.batch import Batch
from tests.engines.worlds import by_steps, make_batch, make_model_folder

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5, 17)
ROTARY = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of two layers that rotates by three axes."""
    changes = {"head_dim": 16, "layer_types": ["full_attention"] * 2, "rope_parameters": ROTARY}
    return make_model_folder("qwen3_5_text", tmp_path_factory.mktemp("model") / "axes", **changes)


def with_axes(batch: Batch) -> Batch:
    """In every segment, from its third token on, an image of 2 x 2 patches, and text from the largest position on."""
    columns = []
    for length in batch.segment_lengths.tolist():
        image = [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
        after = [(n, n, n) for n in range(4, length)]
        columns += [(0, 0, 0), (1, 1, 1), *image, *after][:length]
    batch.position_ids = torch.tensor(columns)
    return batch.check()


def trainer(folder: Path, **own: Any) -> FSDP2Engine:
    settings = TrainerConfig(lr=1e-3, logits_chunk_tokens=8)
    return FSDP2Engine(settings, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=1, trainable=False)


def of_transformers(folder: Path, batch: Batch) -> Tensor:
    """float32 [T]: log-probs by transformers, one segment at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found, lengths = [], batch.segment_lengths.tolist()
    for tokens, positions in zip(batch.token_ids.split(lengths), batch.position_ids.split(lengths), strict=True):
        with torch.no_grad():
            logits = model(tokens[None], position_ids=positions.T[:, None]).logits[0, :-1]
        found += [torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(found) * batch.loss_mask


@pytest.mark.parametrize("packing", ["require", "off"])
def test_log_probs_match_transformers(packing: str, folder: Path, world_of_one: None) -> None:
    batch = with_axes(make_batch(LENGTHS))
    engine, want = trainer(folder, packing=packing), of_transformers(folder, batch)
    for plan in ([[5, 0], [3], [1, 2, 4]], [list(range(6))], [[2], [], [1, 0, 3, 4, 5]]):
        assert (engine.logprobs(batch, plan, 1.0) - want).abs().max() < 1e-5
    plain = make_batch(LENGTHS)
    assert (engine.logprobs(plain, [list(range(6))], 1.0) - want).abs().max() > 1e-2  # the axes matter


def test_segments_of_episodes_by_steps_are_separate_sequences(folder: Path, world_of_one: None) -> None:
    batch = with_axes(by_steps(make_batch(LENGTHS), (2, 1, 3)))
    got = trainer(folder, packing="require").logprobs(batch, [[0, 2], [1]], 1.0)
    assert (got - of_transformers(folder, batch)).abs().max() < 1e-5


def test_equal_prompts_with_different_images_share_no_prefix(folder: Path, world_of_one: None) -> None:
    """Two rows with the same six prompt tokens; the second one has no image."""
    batch = with_axes(make_batch((12, 12, 12, 12), num_prompt_tokens=6).select([0, 3]))
    assert torch.equal(batch.token_ids[:6], batch.token_ids[12:18])
    batch.position_ids[12:] = torch.arange(12)[:, None]
    got = trainer(folder, packing="require").logprobs(batch, [[0, 1]], 1.0)
    assert (got - of_transformers(folder, batch)).abs().max() < 1e-5


@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed (extra: deepspeed)")
def test_deepspeed_matches_transformers(folder: Path, world_of_one: None) -> None:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig

    batch, settings = with_axes(make_batch(LENGTHS)), TrainerConfig(lr=1e-3, logits_chunk_tokens=8)
    engine = ZeroEngine(settings, folder, zero=DeepSpeedConfig(), dtype=torch.float32, total_steps=1)
    got = engine.logprobs(batch, [[5, 0], [3], [1, 2, 4]], 1.0)
    assert (got - of_transformers(folder, batch)).abs().max() < 1e-5


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)")
def test_megatron_refuses_three_axes_and_packs_by_index_not_by_position() -> None:
    from hpcrl.engines.train.megatron.packing import pack

    batch = make_batch((5, 4))
    want = pack(batch, 1, 0, 1)
    batch.position_ids = batch.position_ids + 7
    got = pack(batch, 1, 0, 1)
    assert got.sources.tolist() == want.sources.tolist() == list(range(9))
    with pytest.raises(ValueError, match=r"batch.position_ids has 3 axes; trainer.engine=megatron knows one"):
        pack(with_axes(batch), 1, 0, 1)
