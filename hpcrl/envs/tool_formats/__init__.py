"""The formats in which models write calls of tools: one file each, or one for a few that are alike."""
