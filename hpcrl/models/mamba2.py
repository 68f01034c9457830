"""Mamba 2 (arXiv 2405.21060), and models with its layers whose adapters peft limits in the same way."""

from hpcrl.models.family import Family

FAMILY = Family(
    model_types=("mamba2",),
    small_sizes={"num_heads": 8, "head_dim": 16, "n_groups": 1},
    peft_refuses=frozenset({"out_proj"}),
)
OTHERS = Family(model_types=("mamba", "falcon_mamba", "falcon_h1", "nemotron_h"), peft_refuses=FAMILY.peft_refuses)
