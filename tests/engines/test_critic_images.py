"""The critic of a vision-language model, which has the class that transformers would have for token classification."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import AutoModelForTokenClassification
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.algorithms.interface import Outputs
from hpcrl.engines.hf_folder import save_model
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.critic import add_critic_class
from hpcrl.rollout.batch import Batch
from hpcrl.spec.image_rows import image_spans
from tests.engines.test_critic import Squares, gradients, make_critic
from tests.engines.test_deepspeed_critic import gradients as zero_gradients
from tests.engines.test_deepspeed_critic import make
from tests.engines.test_images_on_ranks import batch_for, difference, part_of, shares
from tests.engines.worlds import norms_of, run_ranks
from tests.vlm import PAD, make_vlm

pytestmark = pytest.mark.numerics


def critic_folder(family: str, folder: Path) -> Path:
    """A critic with a random head, saved by transformers."""
    base = make_vlm(family, folder / "base")
    add_critic_class(base)
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    torch.nn.init.constant_(model.score.bias, 0.4)
    save_model(model, folder / "critic")
    shutil.copy(base / "preprocessor_config.json", folder / "critic")
    return folder / "critic"


def of_transformers(folder: Path, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Values [T] and gradients of Squares, one sequence and transformers' own processor at a time."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found, cu = [], batch.cu("images").tolist()
    for row, tokens in enumerate(batch.token_ids.split(batch.lengths.tolist())):
        given: dict[str, Any] = {}
        if spans := image_spans(batch.images[cu[row] : cu[row + 1]].numpy()):
            shown = [np.frombuffer(batch.pictures[s.digest], np.uint8).reshape(s.height, s.width, 3) for s in spans]
            given = dict(processor(images=[Image.fromarray(image) for image in shown], return_tensors="pt"))
            given["mm_token_type_ids"] = (tokens[None] == PAD).int()
        logits = model(input_ids=tokens[None], use_cache=False, **given).logits[0, :, 0]
        found += [torch.zeros(1), logits[:-1]]
        model.model.rope_deltas = None
    values = torch.cat(found) * batch.loss_mask
    Squares().loss(Outputs(values, values=values), batch, norms_of(batch))[0].backward()
    return values.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_values_and_gradients_match_transformers(family: str, tmp_path: Path, world_of_one: None) -> None:
    folder = critic_folder(family, tmp_path)
    batch, plan = batch_for(folder), [[0, 1, 2], [], [3, 4]]
    values, want = of_transformers(folder, batch)
    assert values[batch.loss_mask].std() > 0.1
    critic = make_critic(folder, own={"packing": "require"})
    assert (critic.values(batch, plan) - values).abs().max() < 2e-5
    assert difference(gradients(critic, batch, plan, norms_of(batch)), want) < 1e-5
    critic.export_hf(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification")
    assert torch.equal(make_critic(tmp_path / "out").values(batch, plan), critic.values(batch, plan))
    assert not make_critic(tmp_path / "base").values(batch, plan).any()  # a new head


def _on_two_ranks(folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    found = {}
    fsdp2.SMALL_MODEL_BYTES = 0
    for name, own in {"layer by layer": {}, "context": {"context_parallel": 2}, "zero": {}}.items():
        critic: Any = make(folder, 3) if name == "zero" else make_critic(folder, own=own)
        whole = batch_for(folder)
        batch, plan = part_of(critic, whole)
        values = critic.values(batch, plan)
        if name == "zero":
            found[name] = values, zero_gradients(critic, batch, norms_of(whole), plan)
        else:
            found[name] = values, gradients(critic, batch, plan, norms_of(whole))
        dist.barrier()
    return found


@pytest.mark.slow
def test_two_ranks_have_the_values_and_gradients_of_one(tmp_path: Path, world_of_one: None) -> None:
    folder = critic_folder("qwen2_5_vl", tmp_path)
    whole = batch_for(folder)
    values, want = of_transformers(folder, whole)
    for rank, results in enumerate(run_ranks(2, _on_two_ranks, folder)):
        for name, (got, mine) in results.items():
            of_rank = values if len(got) == len(values) else shares(values, whole)[rank]
            assert (got - of_rank).abs().max() < 2e-5, name
            assert difference(mine, want) < 1e-5, name
