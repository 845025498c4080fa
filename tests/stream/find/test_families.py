"""Tests of `inspect` on transformer families: it proves each row."""

import pytest
from torch import Tensor

from addnorm import inspect, verify
from support import families, rare_families
from support.judge import judge
from support.pairwise import some

pytest.importorskip("transformers")

FAMILIES = families.families() | {f"more: {name}": family for name, family in rare_families.families().items()}


# Families in which every pair of a stream's facts and every remark on the code occurs.
COVER = (
    "bert", "gpt2", "llama", "more: wav2vec2-conformer", "torch Transformer post_ln", "swinv2", "more: minimax",
    "more: rwkv", "albert", "gptj", "gemma2", "more: fnet", "more: beit", "granite", "more: minicpm3", "t5",
    "more: deberta-v2 with convolution", "more: doge", "olmo2", "torch Decoder pre_ln", "modernbert", "more: lfm2",
    "deberta-v2", "opt post", "more: bloom, residual from the norm", "more: mamba", "more: prophetnet",
    "more: swin", "gpt_neox parallel", "mpt", "falcon 7B", "cohere", "qwen3", "gemma3", "dinov2", "wav2vec2 post",
    "wav2vec2 stable", "more: electra", "more: esm", "more: esm, embedding norm", "more: xlm", "more: convbert",
    "more: squeezebert", "more: rembert", "more: qwen2_moe", "more: gpt_oss", "more: deepseek_v3", "more: olmo",
    "more: minimax, factors 1", "more: nanochat", "more: bitnet", "more: imagegpt", "more: dbrx",
    "more: blenderbot-small", "more: clip vision", "more: siglip vision", "more: data2vec audio",
)  # fmt: skip
ENDS = (
    "the final norm",
    "the norm of the embedding",
    "an earlier state",
)  # what a named wiring may lack, as a remark says


@pytest.mark.parametrize("name", some(FAMILIES, COVER))
def test_inspect_finds_wiring_of_family(name):
    family = FAMILIES[name]
    model, args, kwargs = family.build()
    inspection = inspect(model, *args, **kwargs)
    verdict = judge(inspection, family.answer)
    differences = verdict.wrong + verdict.missing + verdict.reasons
    if len(inspection.streams) == 1 and (wiring := inspection.streams[0].wiring) is not None:
        found = verify(inspection, wiring=wiring).deviations
        differences += [str(one) for one in found if one.term not in ENDS]
    assert not differences, "\n".join([family.name, family.code, *differences])


CASTING = (
    "bert", "llama", "gemma2", "gemma3", "t5", "cohere", "qwen3", "olmo2", "glm4", "granite", "swinv2", "dinov2", "more: mamba",
)  # fmt: skip


@pytest.mark.parametrize("name", some(CASTING, ("bert", "gemma3", "t5", "cohere", "swinv2", "more: mamba")))
def test_inspect_finds_wiring_in_bfloat16(name):
    model, args, kwargs = FAMILIES[name].build()
    kwargs = {key: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in kwargs.items()}
    inspection = inspect(model.bfloat16(), *args, **kwargs)
    verdict = judge(inspection, FAMILIES[name].answer)
    differences = verdict.wrong + verdict.missing + verdict.reasons
    assert not [text for text in differences if "option" not in text], differences  # constants are rounded
