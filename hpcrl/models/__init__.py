"""Properties of model families: one file per family; `families` lists them. Imports no torch.

A family without a file is trained according to its config.json, and refused if that does not define enough.
"""
