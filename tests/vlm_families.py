"""Small models of vision-language families besides Qwen-VL, with transformers' own processors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast, ProcessorMixin

from hpcrl.engines.hf_folder import save_model

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>", "<|video|>", "<img>", "<IMG_CONTEXT>", "</img>"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>", "<image>", "<video>"),
    *("<fake_token_around_image>", "<global-img>", "<|image>", "<image|>", "<end_of_utterance>", *TILES),
)
IDS = {token: 256 + number for number, token in enumerate(SPECIAL)}
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HALF = [0.5] * 3
SQUARE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "pad_token_id": IDS["<|endoftext|>"],
}


NOTHING_ELSE = {"feature_extractor": None, "video_processor": None}


class Small(NamedTuple):
    """A family's token of an image, what its chat template writes for one, config sections, and processor."""

    token: str
    placeholder: str
    config: dict[str, Any]
    processor: dict[str, Any]


def _sized(factor: int, **values: Any) -> dict[str, Any]:
    """A processor for images that keep their ratio of sides."""
    limits = {"shortest_edge": 28 * 28 * factor, "longest_edge": 28 * 28 * 64 * factor}
    return {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": limits, **values}


def _mrope(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    return {"rope_parameters": rope | more}


EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
GRID_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
GRID_TOKENS = {"image_token_id": IDS["<|image|>"], "video_token_id": IDS["<|video|>"]}
GLM_TOKENS = {f"{kind}_{end}_token_id": 3 for kind in ("image", "video") for end in ("start", "end")}
SMALL = {
    "glm4v": Small(
        "<|image|>",
        "<|image|>",
        {
            "text_config": TEXT | _mrope(),
            "vision_config": GRID_TOWER | {"image_size": 56, "patch_size": 14},
            **GRID_TOKENS,
            **GLM_TOKENS,
        },
        _sized(2, image_processor_type="Glm4vImageProcessor"),
    ),
    "glm4v_moe": Small(
        "<|image|>",
        "<|image|>",
        {
            "text_config": TEXT | _mrope() | EXPERTS,
            "vision_config": GRID_TOWER | {"image_size": 56, "patch_size": 14},
            **GRID_TOKENS,
            **GLM_TOKENS,
        },
        _sized(2, image_processor_type="Glm4vImageProcessor"),
    ),
    "glm46v": Small(
        "<|image|>",
        "<|image|>",
        {
            "text_config": {"model_type": "glm4v_text", **TEXT, **_mrope()},
            "vision_config": {"model_type": "glm4v_vision", **GRID_TOWER, "image_size": 56, "patch_size": 14},
            **GRID_TOKENS,
            **GLM_TOKENS,
        },
        _sized(2, image_processor_type="Glm46VImageProcessor"),
    ),
    "qwen3_5": Small(
        "<|image|>",
        "<|image|>",
        {
            "text_config": TEXT | _mrope(mrope_interleaved=True) | LINEAR,
            "vision_config": GRID_TOWER | {"patch_size": 14, "num_position_embeddings": 64},
            "vision_start_token_id": 3,
            "vision_end_token_id": 4,
            **GRID_TOKENS,
        },
        _sized(1, image_processor_type="Qwen2VLImageProcessor", image_mean=HALF, image_std=HALF),
    ),
    "internvl": Small(
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>\n",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": SQUARE | {"image_size": [56, 56], "patch_size": [14, 14]},
            "image_token_id": IDS["<IMG_CONTEXT>"],
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}, "max_patches": 4},
    ),
    "gemma3": Small(
        "<image_soft_token>",
        "<start_of_image>",
        {
            "text_config": TEXT | WINDOWS | {"query_pre_attn_scalar": 16},
            "vision_config": SQUARE | {"image_size": 56, "patch_size": 14, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IDS["<image_soft_token>"],
            "boi_token_index": IDS["<start_of_image>"],
            "eoi_token_index": IDS["<end_of_image>"],
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
    ),
    **{
        name: Small(
            "<|image|>",
            "<|image|>",
            {
                "text_config": TEXT
                | WINDOWS
                | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16}
                | {"use_bidirectional_attention": both_ways},
                "vision_config": SQUARE
                | {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 256},
                "image_token_id": IDS["<|image|>"],
                "video_token_id": IDS["<|video|>"],
                "audio_token_id": 5,
            },
            {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4},
        )
        for name, both_ways in (("gemma4", None), ("gemma4_large", "vision"))
    },
    "llava_onevision": Small(
        "<image>",
        "<image>",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **SQUARE, "image_size": 56, "patch_size": 14},
            "image_token_index": IDS["<image>"],
            "video_token_index": IDS["<video>"],
            "vision_feature_layer": -1,
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168]],
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168]],
        },
    ),
    **{
        family: Small(
            "<image>",
            "<image>",
            {
                "text_config": {"model_type": "llama", **TEXT},
                "vision_config": SQUARE | {"image_size": 56, "patch_size": 14},
                "image_token_id": IDS["<image>"],
                "scale_factor": 2,
            },
            {
                "image_processor_type": f"{name}ImageProcessor",
                "size": {"longest_edge": 112},
                "max_image_size": {"longest_edge": 56},
            },
        )
        for family, name in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))
    },
}


def make_small(family: str, folder: Path, std: float = 0.08, **changes: Any) -> Path:
    """A random model of two layers behind a tower of two blocks, with these changes of its config. Weights are large,
    so images matter."""
    small = SMALL[family]
    sections = {"tie_word_embeddings": False, **small.config}
    for name, values in changes.items():
        sections[name] = sections[name] | values if isinstance(values, dict) else values
    config = AutoConfig.for_model(family.removesuffix("_large"), **sections)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("image_newline"):
            torch.nn.init.normal_(parameter, std=std)
    save_model(model, folder)
    make_tokenizer(small).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(small.processor))
    return folder


def make_tokenizer(small: Small) -> PreTrainedTokenizerFast:
    """A token for each byte, for two line breaks, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": small.token,
            "boi_token": "<start_of_image>" if small.token == "<image_soft_token>" else "<|image>",
            "eoi_token": "<end_of_image>" if small.token == "<image_soft_token>" else "<image|>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<|video|>",
            **dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<end_of_utterance>"),
        },
    )
    made.chat_template = TEMPLATE.replace("PLACEHOLDER", small.placeholder.replace("\n", "\\n"))
    return made


def own_processor(family: str, folder: Path) -> Any:
    """transformers' processor of the family, which resizes with PIL."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4_images
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    other = "transformers.models.gemma4.image_processing_gemma4"  # which needs torchvision
    with mock.patch.dict(sys.modules, {other: gemma4_images}):
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    image_class, processor_class, options = {
        "glm4v": (Glm4vImageProcessorPil, Glm4vProcessor, {}),
        "glm4v_moe": (Glm4vImageProcessorPil, Glm4vProcessor, {}),
        "glm46v": (Glm46VImageProcessorPil, Glm46VProcessor, {}),
        "qwen3_5": (Qwen2VLImageProcessorPil, Qwen3VLProcessor, {}),
        "internvl": (GotOcr2ImageProcessorPil, InternVLProcessor, {"image_seq_length": 4}),
        "gemma3": (Gemma3ImageProcessorPil, Gemma3Processor, {"image_seq_length": 4}),
        "gemma4": (gemma4_images.Gemma4ImageProcessorPil, Gemma4Processor, NOTHING_ELSE),
        "idefics3": (Idefics3ImageProcessorPil, Idefics3Processor, {"image_seq_len": 4}),
        "smolvlm": (SmolVLMImageProcessorPil, SmolVLMProcessor, {"image_seq_len": 4, "video_processor": None}),
        "llava_onevision": (
            LlavaOnevisionImageProcessorPil,
            LlavaOnevisionProcessor,
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
        ),
    }[family.removesuffix("_large")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    words = "transformers.models.smolvlm.processing_smolvlm.num2words"  # of videos' times, a package of its own
    # The check of a missing processor of videos would need torchvision.
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"), mock.patch(words, str):
        return processor_class(image_processor=image_class.from_pretrained(folder), tokenizer=tokenizer, **options)
