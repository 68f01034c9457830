"""The needs of a run, from only an HF config.json: parameters, bytes of memory per rank, impossible layouts. Pure
functions of the configuration, without torch, which a login node can use."""
