"""Small vision-language models in HF layout, with a processor file and a tokenizer, and images for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from hpcrl.data.chat import bind
from hpcrl.engines.hf_folder import save_model
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE, Medium

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
PAD = 256 + SPECIAL.index("<|image_pad|>")
VOCAB = 256 + len(SPECIAL)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
RECURRENT = ("qwen3_5", "qwen3_5_moe")
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    f"{{% if part['type'] == 'image' %}}{PLACEHOLDER}"
    "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen3_5": 16, "qwen3_5_moe": 16}


def make_vlm(family: str, folder: Path, std: float = 0.08, **changes: Any) -> Path:
    """A random model of two layers behind a tower of two blocks. Weights are large, so images matter."""
    sections, patch = _sections(family), PATCH[family]
    for name, values in changes.items():
        sections[name] = sections[name] | values if isinstance(values, dict) else values
    config = AutoConfig.for_model(family, **sections)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    save_model(model, folder)
    make_tokenizer().save_pretrained(folder)
    least, most = (2 * patch) ** 2, (2 * patch) ** 2 * 64
    mean = [0.5] * 3 if family.startswith("qwen3") else [0.48145466, 0.4578275, 0.40821073]
    std_of_pixels = [0.5] * 3 if family.startswith("qwen3") else [0.26862954, 0.26130258, 0.27577711]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": mean,
        "image_std": std_of_pixels,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


def noise(width: int, height: int, vision: Vision, seed: int) -> Medium:
    """An image of random pixels, of a size that the model sees."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Medium(IMAGE, pixels.tobytes(), width, height, length=vision.num_tokens(width, height))


def seeing_tokenizer() -> PreTrainedTokenizerFast:
    """make_tokenizer() with the image sizes of a small model."""
    vision = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64, image_token_id=PAD)
    return bind(make_tokenizer(), {}, vision)


def png(colour: int, width: int = 28, height: int = 28) -> bytes:
    """A file of equal grey pixels."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (colour, colour, colour)).save(file, "PNG")
    return file.getvalue()


def _sections(family: str) -> dict[str, Any]:
    hidden, heads = 64, 4
    half = hidden // heads // 2
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": 256 + SPECIAL.index("<|im_end|>"),
        "pad_token_id": 256,
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH[family]}
    if family.startswith("qwen2"):
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    else:
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 1e4}
        text |= {"rope_parameters": rope, "head_dim": 2 * half}
    match family:
        case "qwen2_vl":
            vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": hidden}
        case "qwen2_5_vl":
            vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden}
            vision |= {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        case _:
            vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden}
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    if family in RECURRENT:
        del vision["deepstack_visual_indexes"]
        text |= {"layer_types": ["linear_attention", "full_attention"]}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    if family == "qwen3_5_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        text |= {"shared_expert_intermediate_size": 20}
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    tokens = {"image_token_id": PAD, "video_token_id": VOCAB - 1, "vision_start_token_id": PAD - 1}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **tokens}
