"""OLMo 2 (arXiv 2501.00656) and OLMo 3 (arXiv 2512.13961): norms after attention and MLP, and of all heads together."""

from hpcrl.models.family import Family
from hpcrl.models.shape import Decoder

OLMO2 = Family(
    model_types=("olmo2",),
    measured_layers=True,
    decoder=Decoder(reads_bias=True, qk_norm=True, qk_norm_joint=True, norms_after=True),
    native=True,
)
OLMO3 = Family(
    model_types=("olmo3",),
    measured_layers=True,
    decoder=Decoder(reads_bias=True, qk_norm=True, qk_norm_joint=True, norms_after=True, windows="by layer"),
    native=True,
)
