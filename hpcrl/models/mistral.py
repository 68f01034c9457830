"""Mistral (arXiv 2310.06825), and Ministral, whose layers have windows or not."""

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.shape import Decoder

FAMILY = Family(
    model_types=("mistral",),
    decoder=Decoder(windows="all"),
    native=True,
    megatron=MegatronModel(),
    vllm_slices=True,
)
MINISTRAL = Family(model_types=("ministral",), decoder=Decoder(windows="by layer"), native=True)
