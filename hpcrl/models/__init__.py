"""What hpcrl knows of model families: one file each, and `families` lists them. Imports no torch.

A family without a file is trained by what its config.json says, and refused where that does not suffice.
"""
