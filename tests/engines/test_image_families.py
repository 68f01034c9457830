"""Families that see images: rows have the tokens of transformers' own processor, and the log-probs and gradients of
transformers' own model, row by row."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from hpcrl.convert.file_names import FileNames
from hpcrl.convert.streaming import copy_small_files
from hpcrl.data.chat import bind
from hpcrl.data.image_tokens import encode_with_images
from hpcrl.data.pictures import read_picture
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.engines.patches import tower_inputs
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.frozen import freeze
from hpcrl.models.families import SEEING, vision_of
from hpcrl.models.vision import Vision
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from tests.engines.test_images import engine_of, row_of
from tests.engines.worlds import Weighted
from tests.vlm import FAMILIES as QWEN
from tests.vlm_families import SMALL, make_small, own_processor

pytestmark = pytest.mark.numerics

SIZES = ((60, 110), (112, 56), (84, 84), (70, 300), (56, 56), (9, 20))
"""Heights and widths: of one part and of several, wide and high, larger and smaller than the model's squares."""
TOWER_INPUTS = ("pixel_values", "image_grid_thw", "image_position_ids")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_small(family, tmp_path_factory.mktemp("vlm") / family) for family in SMALL}


def picture(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def seen_in(folder: Path, vision: Vision, image: Image.Image) -> Image.Image:
    """The picture in a size that the processor keeps, if the family's images have one."""
    return image.resize(vision.fit(*image.size)) if vision.form in ("patches", "tiles") else image


def file_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_every_family_that_sees_images_is_compared_with_transformers() -> None:
    """The engine's own probe of packing has no image, so a new family must be compared here."""
    compared = {*QWEN, *(name.removesuffix("_large") for name in SMALL)}
    assert compared | {"qwen3_5_moe"} == {*SEEING}, "whose tower is qwen3_5's"


@pytest.mark.parametrize("family", SMALL)
def test_tokens_and_pixels_equal_transformers_processor(family: str, folders: dict[str, Path]) -> None:
    folder, placeholder = folders[family], SMALL[family].placeholder
    vision, processor = vision_of(folder), own_processor(family, folder)
    assert vision is not None
    tokenizer = bind(AutoTokenizer.from_pretrained(folder), {}, vision)
    for seed, (height, width) in enumerate(SIZES):
        for images in ([], [picture(height, width, seed)], [picture(height, width, seed), picture(50, 170, 9)]):
            images = [seen_in(folder, vision, image) for image in images]
            text = f"a\n{placeholder.join(['', *(['b'] * len(images))])}\nc"
            want = processor(text=[text], images=images or None, return_tensors="pt")
            media = [medium for image in images for medium in read_picture(file_of(image), vision)]
            ids, placed = encode_with_images(tokenizer, text, media)
            assert ids == want["input_ids"][0].tolist()
            tokens = [token for medium in placed for token in ids[medium.start : medium.start + medium.length]]
            assert set(tokens) <= {vision.image_token_id} and len(tokens) == ids.count(vision.image_token_id)
            if images:
                got = tower_inputs([medium.pixels for medium in media], vision)["pixel_values"]
                given = want["pixel_values"]
                if vision.form == "tiles":  # transformers pads to equal numbers of parts
                    given = torch.cat([part[part.flatten(1).any(1)] for part in given])
                if vision.form == "padded patches":
                    given = given[:, : got.shape[1]]
                assert got.shape == given.shape and (got - given).abs().max() < 1e-5


def rows_of(folder: Path, vision: Vision) -> tuple[Batch, list[tuple[str, list[Image.Image]]]]:
    """Rows with one picture, the same one again, another one under the same text, two pictures, and none."""
    a, b = (seen_in(folder, vision, picture(60, 110, seed)) for seed in (1, 2))
    c = seen_in(folder, vision, picture(80, 60, 3))
    placeholder = SMALL[folder.name].placeholder
    given = [
        (f"q:{placeholder}what?", [a], "red square"),
        (f"q:{placeholder}what?", [a], "blue"),
        (f"q:{placeholder}what?", [b], "red"),
        (f"q:{placeholder}and{placeholder}two", [c, a], "many words here"),
        ("no image", [], "text only"),
    ]
    tokenizer = bind(AutoTokenizer.from_pretrained(folder), {}, vision)
    samples = []
    for number, (text, images, answer) in enumerate(given):
        media = [medium for image in images for medium in read_picture(file_of(image), vision)]
        prompt, placed = encode_with_images(tokenizer, text, media)
        samples.append(row_of(number, prompt, answer, placed))
    return batch_from_samples(samples, [0, 0, 1, 2, 3]).check(), [(text, images) for text, images, _ in given]


def separately(
    folder: Path, batch: Batch, rows: list[tuple[str, list[Image.Image]]], image_token_id: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of transformers' model and its own processor, a row at a time; gradients of the loss of Weighted."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    processor = own_processor(folder.name, folder)
    found = []
    for (text, images), tokens in zip(rows, batch.token_ids.split(batch.lengths.tolist()), strict=True):
        given: dict[str, Any] = dict(processor(text=[text], images=images or None, return_tensors="pt"))
        prompt = given.pop("input_ids")[0]
        assert prompt.tolist() == tokens[: len(prompt)].tolist()
        given = {name: value for name, value in given.items() if name in TOWER_INPUTS}
        if folder.name == "llava_onevision" and images:
            given["image_sizes"] = torch.tensor([[image.height, image.width] for image in images])
        if images or folder.name.startswith("gemma"):
            kind = "token_type_ids" if folder.name == "gemma3" else "mm_token_type_ids"
            given[kind] = (tokens[None] == image_token_id).int()
        if folder.name not in ("glm4v", "glm4v_moe", "glm46v", "qwen3_5", "gemma4", "gemma4_large"):
            given.pop("mm_token_type_ids", None)
        logits = model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1]
        found += [torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]]
        model.model.rope_deltas = None
    logprobs = torch.cat(found) * batch.loss_mask
    weights = torch.cos(batch.token_ids.float() + batch.position_ids) + 0.5  # as in Weighted
    (-(logprobs * weights)[batch.loss_mask].sum() / batch.loss_mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


@pytest.mark.parametrize("family", SMALL)
def test_rows_equal_transformers(family: str, folders: dict[str, Path], world_of_one: None) -> None:
    folder = folders[family]
    vision = vision_of(folder)
    assert vision is not None
    batch, rows = rows_of(folder, vision)
    want, gradients = separately(folder, batch, rows, vision.image_token_id)
    assert all(any(name.startswith(tower) for name in gradients) for tower in vision.towers)
    norms = Norms(float(batch.loss_mask.sum()), float(batch.num_sequences))
    for packing in ("require", "off"):
        engine = engine_of(folder, packing=packing)
        assert engine.packing == (packing == "require")
        check(engine, batch, want, gradients, norms)


GEMMA4 = {
    "layers that share keys": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "no inputs per layer": {"hidden_size_per_layer_input": 0},
}
"""Keys that published sizes of Gemma 4 set differently."""


@pytest.mark.slow
@pytest.mark.parametrize("changes", GEMMA4)
def test_rows_of_every_size_of_gemma_4_equal_transformers(changes: str, tmp_path: Path, world_of_one: None) -> None:
    folder = make_small("gemma4_large", tmp_path / "gemma4_large", text_config=GEMMA4[changes])
    vision = vision_of(folder)
    assert vision is not None
    batch, rows = rows_of(folder, vision)
    want, gradients = separately(folder, batch, rows, vision.image_token_id)
    norms = Norms(float(batch.loss_mask.sum()), float(batch.num_sequences))
    check(engine_of(folder, packing="require"), batch, want, gradients, norms)


@pytest.mark.parametrize("family", SMALL)
def test_every_family_has_a_merger_and_a_tower_to_freeze(family: str, folders: dict[str, Path]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folders[family])
    for part in ("merger", "vision"):
        before = sum(parameter.requires_grad for parameter in model.parameters())
        freeze(model, [part])
        assert 0 < sum(parameter.requires_grad for parameter in model.parameters()) < before


@pytest.mark.parametrize("family", ("internvl", "gemma3", "gemma4_large"))
def test_another_picture_gives_other_logprobs(family: str, folders: dict[str, Path], world_of_one: None) -> None:
    vision = vision_of(folders[family])
    assert vision is not None
    batch, _ = rows_of(folders[family], vision)
    engine = engine_of(folders[family], packing="require")
    known = engine.logprobs(batch, [[0, 1, 2, 3, 4]], 1.0)
    changed = {digest: bytes(len(pixels)) for digest, pixels in batch.pictures.items()}
    blind = engine.logprobs(dataclasses.replace(batch, pictures=changed), [[0, 1, 2, 3, 4]], 1.0)
    off = [float(part.abs().max()) for part in (known - blind).split(batch.lengths.tolist())]
    assert all(row > 1e-2 for row in off[:4]) and off[4] < 1e-6


@pytest.mark.parametrize("family", SMALL)
def test_an_exported_folder_has_the_models_files(
    family: str, folders: dict[str, Path], world_of_one: None, tmp_path: Path
) -> None:
    out = tmp_path / family
    engine_of(folders[family]).export_hf(out)
    assert {path.name for path in out.iterdir()} >= {path.name for path in folders[family].iterdir()}
    tensors = [dict(read_safetensors(folder)) for folder in (folders[family], out)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    own = [type(AutoImageProcessor.from_pretrained(folder)) for folder in (folders[family], out)]
    assert own[0] is own[1] is type(own_processor(family, folders[family]).image_processor)
    converted = tmp_path / "converted"
    converted.mkdir()
    copy_small_files(out, converted)
    assert (converted / "preprocessor_config.json").is_file() and (converted / "chat_template.jinja").is_file()
    model = AutoModelForImageTextToText.from_pretrained(out)
    names = FileNames(family.removesuffix("_large"))
    in_files = {part.name for name, value in model.state_dict().items() for part in names.of(name, tuple(value.shape))}
    assert in_files == set(tensors[1])


def check(engine: FSDP2Engine, batch: Batch, want: Tensor, gradients: dict[str, Tensor], norms: Norms) -> None:
    """The engine's log-probs and gradients are these, however rows are divided into micro-batches."""
    for plan in ([[0, 1, 2, 3, 4]], [[4], [0, 3], [1, 2], []]):
        got = engine.logprobs(batch, plan, 1.0)
        assert (got - want).abs().max() < 2e-5
        engine.accumulate(batch, plan, Weighted(), norms)
        found = {name.removeprefix("hf."): p.grad for name, p in engine.model.named_parameters()}
        for name, gradient in gradients.items():
            assert (found[name] - gradient).abs().max() < 2e-5 * max(1.0, float(gradient.abs().max())), name
        engine.discard_gradients()
