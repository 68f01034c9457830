"""Experiment trackers in addition to metrics.jsonl: one file each, and each called from its own thread."""
