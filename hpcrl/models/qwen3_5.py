"""Qwen3.5, dense and with experts: the decoder of Qwen3-Next, also behind the tower of Qwen3-VL."""

from dataclasses import replace

from hpcrl.models.family import Family
from hpcrl.models.qwen3_next import DECODER, MEGATRON
from hpcrl.models.router import normalised_router
from hpcrl.models.vision import read_vision

TEXT = Family(
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    unlisted=replace(DECODER, separate_delta=True),
    router=normalised_router,
    native=True,
    megatron=MEGATRON,
)
FAMILY = replace(TEXT, model_types=("qwen3_5", "qwen3_5_moe"), scorers=("qwen3_5",), vision=read_vision, megatron=None)
