"""Phi-3 and Phi-4 (arXiv 2404.14219)."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

FAMILY = Family(model_types=("phi3",), decoder=Decoder(joined=True, partly_rotated=True, windows="all"), native=True)
