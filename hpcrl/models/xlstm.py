"""xLSTM (arXiv 2405.04517)."""

from hpcrl.models.family import Family

FAMILY = Family(model_types=("xlstm",), mixers=("xLSTMLayer",))
