"""BERT (arXiv 1810.04805), which transformers has as a causal language model, too."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("bert",), untrainable="its vocabulary projection is not one matrix after the decoder")
