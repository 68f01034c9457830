"""Names of torchvision.io."""

from torchvision import name_of as __getattr__  # noqa: F401
