"""A judge whose chat template computes the verdict, and whose model repeats its prompt."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model

# The line that the question asks for, with the number of characters of the response (and of `shift`, a variable of the
# template), modulo 10, in place of V.
TEMPLATE = """\
{%- set asked = messages[-1]['content'] -%}
{%- set response = (asked.split('<<response ')[1].split('\n<<end of')[0])[11:] if '<<response ' in asked else '' -%}
{{- asked.split('\n')[-1][:-1] ~ ((response | length) + (shift or 0)) % 10 -}}<|im_end|>"""
SAID = "verdict 01234567: 7"
AMPLITUDE = 30.0


def make_echo_judge(folder: Path) -> Path:
    """A Qwen2 of one layer, whose biases let every token attend to the one as far back as the verdict's line is long:
    it writes its prompt again. A token is a byte."""
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    make_tiny_model(TinyModel(vocab_size=259, **sizes), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layer, size = model.model.layers[0], 32
    distance = len(SAID)  # and the end of the message, from which on the next token is written
    angles = distance * 10000.0 ** (-2 * torch.arange(size // 2) / size)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(embedding * math.sqrt(64) / embedding.norm(dim=1, keepdim=True).clamp(min=1e-6))
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        ahead = torch.cat([torch.ones(size // 2), torch.zeros(size // 2)])
        layer.self_attn.q_proj.bias.copy_(AMPLITUDE * ahead.repeat(2))
        layer.self_attn.k_proj.bias.copy_(AMPLITUDE * torch.cat([angles.cos(), angles.sin()]).repeat(2))
        layer.self_attn.v_proj.weight.copy_(torch.eye(64))
        layer.self_attn.o_proj.weight.copy_(10 * torch.eye(64))
    model.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder
