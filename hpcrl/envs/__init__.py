"""Environments, one file each; `specs` lists the built-in environments."""
