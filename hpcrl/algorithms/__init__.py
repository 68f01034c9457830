"""Credits and objectives, a file each; the pairs that are algorithms stand in `specs`."""
