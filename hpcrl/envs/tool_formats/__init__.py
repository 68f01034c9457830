"""The formats in which models write tool calls: one file each, or one for a few similar formats."""
