"""Properties of model families: one file each; `families` lists them. Imports no torch.

A family without a file is trained according to its config.json, and refused where that does not suffice.
"""
