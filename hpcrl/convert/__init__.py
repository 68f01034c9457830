"""Checkpoints of Megatron-Core and of hpcrl to HF layout, and HF models to Megatron's: `python -m hpcrl.convert`."""
