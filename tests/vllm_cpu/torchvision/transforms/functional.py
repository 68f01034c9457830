"""Names of torchvision.transforms.functional."""

from enum import Enum

from torchvision import name_of as __getattr__  # noqa: F401


class InterpolationMode(Enum):
    """torchvision's names of filters."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
