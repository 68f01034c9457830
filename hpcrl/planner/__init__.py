"""The needs of a run, from an HF config.json only: parameters, bytes of memory per rank, impossible layouts. Pure
functions of the configuration, without torch, so that a login node can use them."""
