"""Families whose attention in transformers does not use the attention interface, and gets no layout of sequences."""

from hpcrl.models.family import Family

FAMILY = Family(
    model_types=("codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "xglm"),
    row_attention=(
        *("CodeGenAttention", "FalconAttention", "GPTNeoSelfAttention", "GPTNeoXJapaneseAttention"),
        *("GPTJAttention", "XGLMAttention"),
    ),
)
