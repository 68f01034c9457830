"""What a run needs, computed from its configuration and an HF config.json: parameters, bytes of memory per rank, and
impossible layouts. Needs no torch, so it also runs on a login node."""
