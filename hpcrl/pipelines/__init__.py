"""Pipelines: each one reads like pseudo-code and runs on rank 0."""
