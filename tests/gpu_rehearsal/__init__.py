"""hpcrl's own code as it would run on a GPU, on a CPU: docs/gpus.md, "Rehearsal on a CPU"."""
