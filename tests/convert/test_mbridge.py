"""The tables of Megatron's names against mbridge: equal tensors in both directions, for every family that both have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.engines.train.megatron.names import parts, shard, table
from hpcrl.models.families import MEGATRON
from tests.engines.worlds import make_model_folder

pytestmark = pytest.mark.slow
UNKNOWN_TO_MBRIDGE = {"mistral", "deepseek_v2", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
CHANGES: dict[str, dict[str, Any]] = {"glm4_moe": {"use_qk_norm": True, "attention_bias": True}}


@pytest.fixture(scope="module")
def bridges() -> Any:
    pytest.importorskip("megatron.core")
    pytest.importorskip("mbridge", reason="mbridge is not installed (extra: megatron)")
    from mbridge.core import bridge

    return bridge._MODEL_REGISTRY


def bridge_of(bridges: Any, family: str, folder: Path) -> Any:
    """mbridge's names and layouts for a model. Its configuration of Megatron-Core is not built, because some need
    rope_theta, which transformers 5 has moved into rope_parameters."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "head_dim", None) is None:  # transformers 5 keeps the default as None
        config.head_dim = config.hidden_size // config.num_attention_heads
    bridge = object.__new__(bridges[family])
    bridge.hf_config, bridge.dtype, bridge.make_vocab_size_divisible_by = config, None, None
    bridge.config = SimpleNamespace(num_layers=config.num_hidden_layers, mtp_num_layers=None)
    bridge._adjust_mapping_for_shared_weights()
    return bridge


@pytest.mark.parametrize("family", [family for family in MEGATRON if family not in UNKNOWN_TO_MBRIDGE])
def test_every_tensor_equals_the_bridges(family: str, bridges: Any, tmp_path: Path) -> None:
    from hpcrl.convert.weight_files import WeightFiles

    folder = make_model_folder(family, tmp_path / "model", **CHANGES.get(family, {}))
    files, bridge = WeightFiles(folder), bridge_of(bridges, family, folder)
    tensors = {name: files.read(name, 0, place.shape[0]) for name, place in files.tensors.items()}
    names = table(json.loads((folder / "config.json").read_text()), "fused")
    assert set(names.shapes) == set(tensors)
    back: dict[str, Tensor] = {}
    for entry in names.entries:
        hf = bridge._weight_name_mapping_mcore_to_hf(entry.name)
        assert set(hf) == {rows.hf for rows in entry.rows}, entry.name
        own = shard(entry, tensors)
        theirs = bridge._weight_to_mcore_format(entry.name, [tensors[name] for name in hf])
        assert torch.equal(own, theirs), entry.name
        found = dict(zip(*bridge._weight_to_hf_format(entry.name, own), strict=True))
        ours = {name: values for name, _, values in parts(entry, own)}
        assert found.keys() == ours.keys() and all(torch.equal(found[name], ours[name]) for name in ours), entry.name
        back |= found
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_families_without_a_bridge_are_known(bridges: Any) -> None:
    assert set(MEGATRON) - set(bridges) == UNKNOWN_TO_MBRIDGE
