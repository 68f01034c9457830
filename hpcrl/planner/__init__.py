"""What a run will need, from an HF config.json alone: parameters, bytes of memory per rank, layouts that cannot be.

Pure functions of the configuration; imports no torch, so that a login node can use it.
"""
