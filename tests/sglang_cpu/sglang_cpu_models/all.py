from __future__ import annotations

from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [Qwen2ForCausalLM, Qwen3MoeForCausalLM]
