"""Rewards, one file each; `specs` lists the built-in rewards."""
