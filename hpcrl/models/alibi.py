"""Bloom and MPT, whose attention adds alibi's biases (arXiv 2108.12409), and other families that are not packed."""

from hpcrl.models.family import Family

ALIBI = "alibi adds a token's place among all tokens of a forward pass to its scores"
FAMILY = Family(model_types=("bloom", "mpt"), unpackable=ALIBI)
DOGE = Family(model_types=("doge",), unpackable="it chooses keys by their values, which are equal for equal tokens")
GPT = Family(
    model_types=("openai-gpt",), unpackable="its attention makes its own mask over all tokens of a forward pass"
)
