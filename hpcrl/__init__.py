"""hpcrl: reinforcement learning for large language models as a Slurm batch toolkit on torch.distributed."""

__version__ = "0.1.0"
