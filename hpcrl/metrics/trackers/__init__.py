"""Trackers of experiments beside metrics.jsonl: one file each, told from a thread of their own."""
