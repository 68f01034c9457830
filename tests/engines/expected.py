"""The expected outcome for a tiny version of each causal language model of transformers 5.19
(tests.engines.architectures)."""

from __future__ import annotations

PACKED = """
    afmoe apertus arcee aria_text axk1 axk2 bamba biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
    falcon falcon_h1 falcon_mamba flex_olmo fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    jais2 jamba jetmoe kimi_linear laguna lfm2 lfm2_moe llama llama4 llama4_text longcat_flash mamba mamba2 mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat
    nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2
    qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zaya
"""
"""Trained with several rows packed into one."""

ROWS = """
    bart bigbird_pegasus blenderbot blenderbot-small bloom doge git marian mbart mpt mvp openai-gpt pegasus plbart
    trocr whisper
"""
"""Trained one row at a time: alibi (bloom, mpt), a mask of its own (openai-gpt), keys chosen by their values, so those
of equal tokens are equally good (doge), and decoders of encoder-decoder families, which take no positions."""

REFUSED: dict[str, str] = {
    "bert": r"start: does not train model_type=bert",
    "bert-generation": r"log-probs change by .* nats with the tokens that follow",
    "big_bird": r"log-probs change by .* nats with the tokens that follow",
    "camembert": r"log-probs change by .* nats with the tokens that follow",
    "data2vec-text": r"log-probs change by .* nats with the tokens that follow",
    "electra": r"its decoder fails",
    "emu3": r"start: has none of model_type=",
    "ernie": r"log-probs change by .* nats with the tokens that follow",
    "inkling_text": r"log-probs from its hidden states differ by .* nats from its own logits",
    "megatron-bert": r"log-probs change by .* nats with the tokens that follow",
    "mllama": r"start: has none of model_type=",
    "modernbert-decoder": r"log-probs from its hidden states differ by .* nats from its own logits",
    "prophetnet": r"log-probs change by .* nats with the tokens that follow",
    "rembert": r"its decoder fails",
    "roberta": r"log-probs change by .* nats with the tokens that follow",
    "roberta-prelayernorm": r"log-probs change by .* nats with the tokens that follow",
    "roc_bert": r"log-probs change by .* nats with the tokens that follow",
    "roformer": r"its decoder fails",
    "xlm": r"log-probs change by .* nats with the tokens that follow",
    "xlm-roberta": r"log-probs change by .* nats with the tokens that follow",
    "xlm-roberta-xl": r"log-probs change by .* nats with the tokens that follow",
    "xlnet": r"log-probs change by .* nats with the tokens that follow",
    "xmod": r"its forward fails",
}
"""Refused, with what the error says; `start: ` on the login node."""

EXPECTED: dict[str, str] = dict.fromkeys(PACKED.split(), "packed") | dict.fromkeys(ROWS.split(), "rows") | REFUSED
IN_SAMPLE = """
    llama qwen2 qwen2_moe phimoe doge minimax_m3_vl_text gemma2 gemma3 gemma4 llama4
    falcon_h1 deepseek_v3 deepseek_v32 gpt_oss qwen3_next lfm2 roberta gpt2 cohere minicpm3
    gptj stablelm rwkv olmo2 nemotron_h mixtral glm4_moe minimax recurrent_gemma
"""
SAMPLE = tuple(IN_SAMPLE.split())
"""One of every mechanism."""
