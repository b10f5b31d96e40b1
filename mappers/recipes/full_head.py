"""full_head: all kv heads of the k source layers predict each target head.

The production map of "Cross-model KV cache translation" (arXiv 2608.03893): keys from keys without
their rotary embedding, values from values, centred ridge regression. k * H_s * D_s inputs.
"""

from mappers.recipes.ridge import RidgeRecipe

FULL_HEAD = RidgeRecipe(name="full_head", structure="all_heads")
