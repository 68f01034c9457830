"""Pipelines: each reads like pseudo-code and runs on rank 0."""
