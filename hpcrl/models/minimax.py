"""MiniMax-01: lightning attention (arXiv 2501.08313)."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("minimax",), mixers=("MiniMaxLightningAttention",))
