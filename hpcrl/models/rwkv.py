"""RWKV (arXiv 2305.13048): both parts of a layer read the previous token."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("rwkv",), mixers=("RwkvSelfAttention", "RwkvFeedForward"))
