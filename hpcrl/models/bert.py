"""BERT (arXiv 1810.04805), which transformers also offers as a causal language model."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("bert",), untrainable="its vocabulary projection is not one matrix after the decoder")
