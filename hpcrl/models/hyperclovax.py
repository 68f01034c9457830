"""HyperCLOVA X (arXiv 2404.01954)."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("hyperclovax",), multiplies_logits=True)
