"""Gemma 2 (arXiv 2408.00118) and 3 (arXiv 2503.19786), text only. Gemma 3 ignores its key attn_logit_softcapping."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

GEMMA2 = Family(
    model_types=("gemma2",),
    decoder=Decoder(reads_bias=True, gemma=True, soft_capped=True, windows="by layer", head_dim=256),
    native=True,
)
GEMMA3 = Family(
    model_types=("gemma3_text",),
    decoder=Decoder(reads_bias=True, gemma=True, qk_norm=True, windows="by layer", head_dim=256),
    native=True,
    measured_layers=True,
)
