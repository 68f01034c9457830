"""Environments, a file each; `specs` lists the built-in ones."""
