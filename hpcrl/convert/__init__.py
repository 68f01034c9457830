"""Convert checkpoints of Megatron-Core and hpcrl to HF layout, or HF models to Megatron: `python -m hpcrl.convert`."""
