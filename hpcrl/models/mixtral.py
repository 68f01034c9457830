"""Mixtral (arXiv 2401.04088)."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("mixtral",), peft_experts=frozenset({"gate", "w1", "w2", "w3"}))
