"""Credits and objectives, one file each; `specs` defines the algorithms as pairs of them."""
