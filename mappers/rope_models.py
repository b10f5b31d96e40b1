"""Which elements of a key vector each model family rotates together.

A rotary embedding turns pairs of elements. Two pairings are in use, and nothing in a
``config.json`` tells them apart: only the model's code does. A wrong guess gives finite, plausible
and wrong keys, so a ``model_type`` is listed here only after its cached keys were seen to follow
the pairing in every layer; ``tests/mappers/test_rope_models.py`` runs each of them through
transformers. Families that leave some layers without rotation (``smollm3``, ``cohere2``,
``exaone4``) or normalise keys after it (``hunyuan_v1_dense``, ``nanochat``) are absent on purpose.
"""

from typing import Literal

Pairing = Literal["half", "interleaved"]

# element i turns with element i + rotary_dim / 2
HALF = frozenset(
    "apertus arcee aria_text bitnet dots1 flex_olmo gemma gemma2 gemma3_text glm4_moe gpt_neox "
    "gpt_oss granite granitemoe granitemoeshared hy_v3 hyperclovax llama minimax_m2 ministral "
    "ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_moe seed_oss solar_open stablelm starcoder2 vaultgemma".split()
)

# element 2i turns with element 2i + 1
INTERLEAVED = frozenset("cohere ernie4_5 ernie4_5_moe glm glm4 helium".split())

# the families whose attention leaves the last part of each head unrotated when the config says so
PARTIAL = frozenset(
    "glm glm4 glm4_moe gpt_neox minimax_m2 nemotron persimmon phi phi3 stablelm".split()
)


def pairing_of(model_type: str) -> Pairing | None:
    """The pairing of a transformers ``model_type``, or None where it was not verified."""
    if model_type in HALF:
        return "half"
    return "interleaved" if model_type in INTERLEAVED else None
