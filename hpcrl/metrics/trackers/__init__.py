"""Trackers of experiments beside metrics.jsonl: one file each, and each called from its own thread."""
