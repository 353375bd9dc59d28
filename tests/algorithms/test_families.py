"""The layout of every family of transformers, and its log-probabilities and gradients against transformers itself in
float64, with eager attention, on single unpadded sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.algorithms.policy.policy import Policy
from components.errors import ResourceError
from tests.algorithms.builders import relative_difference
from tests.algorithms.exact_families import computed, expected, layout, write

LAYOUTS = {
    "trie": """afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
        deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3_text
        gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
        granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
        jais2 jetmoe laguna llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
        ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
        phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu""",
    "padded": """axk2 bamba bloom codegen deepseek_v32 doge falcon falcon_h1 falcon_mamba glm_moe_dsa gpt_neo
        gpt_neox_japanese gptj granitemoehybrid hy_v4 inkling_text jamba kimi_linear lfm2 lfm2_moe llama4_text mamba
        mamba2 minimax mpt nemotron_h olmo_hybrid openai-gpt qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
        rwkv xlstm zamba2 zaya""",
}
"""Families by layout."""
EXPECTED = {family: layout for layout, families in LAYOUTS.items() for family in families.split()}
WIDE = ("xlstm",)
"""Families that transformers fails to compute in bfloat16."""
REFUSED = {
    "bert": "its tokens attend to later tokens; expected a causal language model",
    "moshi": "its tokens attend to later tokens",  # in transformers' eager attention
}
QUICK = [
    *("bloom", "deepseek_v3", "gemma2", "gpt_oss", "jamba", "lfm2", "llama", "mamba2", "mixtral", "nemotron_h"),
    *("qwen3", "qwen3_next", "xlstm"),
]


def problem(family: str, folder: Path) -> str | None:
    """Return what is wrong with a family, or None."""
    spec = write(family, folder)
    policy = Policy(folder, spec, seed=0)
    try:
        narrow = layout(Policy(folder, spec.model_copy(update={"dtype": "bfloat16"}), seed=0))
    except ResourceError:
        narrow = "refused"
    if (layout(policy), narrow) != (EXPECTED[family], "refused" if family in WIDE else EXPECTED[family]):
        return f"{layout(policy)}, in bfloat16 {narrow}, expected {EXPECTED[family]}"
    (logprob_S, gradient), (expected_S, expected_gradient) = computed(policy), expected(folder)
    nats = float((logprob_S - expected_S).abs().max())
    difference = relative_difference(gradient, expected_gradient)
    if nats <= 5e-5 and difference <= 2e-4:
        return None
    return f"log-probabilities are off by {nats:.1e} nats, the gradient by {difference:.1e}"


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers, of families
@pytest.mark.parametrize(
    "families", [QUICK, pytest.param(sorted(set(EXPECTED) - set(QUICK)), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_family_is_computed_exactly(families, tmp_path):
    problems = {family: problem(family, tmp_path / family) for family in families}
    assert {family: text for family, text in problems.items() if text} == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_trained_are_refused(family, tmp_path):
    spec = write(family, tmp_path)
    with pytest.raises(ResourceError, match=f"cannot be .*{REFUSED[family]}"):
        Policy(tmp_path, spec, seed=0)


def test_sparse_attention_is_refused_beyond_its_selection(tmp_path):
    spec = write("deepseek_v32", tmp_path, index_topk=64)
    with pytest.raises(ResourceError, match=r"selection of 64 tokens .* expected model.max_length=64 or less"):
        Policy(tmp_path, spec, seed=0)
