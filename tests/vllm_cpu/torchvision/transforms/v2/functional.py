"""Names of torchvision.transforms.v2.functional."""

from torchvision import name_of as __getattr__  # noqa: F401
from torchvision.transforms.functional import InterpolationMode  # noqa: F401
