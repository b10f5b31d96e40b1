"""head_local: each target head is predicted by its matched source head in the k source layers.

The structure of CacheBridge (arXiv 2609.00891), without its row weights: heads are matched by
index, which needs H_s times fewer weights and operations than ``full_head``. Where the head counts
differ they are matched in groups:

- H_t > H_s (towards MHA): source heads are repeated. With r = H_t / H_s, the target heads
  ``r * h .. r * h + r - 1`` all read source head h, each through weights of its own.
- H_t < H_s (towards GQA): source heads are pooled. With r = H_s / H_t, target head h reads the
  source heads ``r * h .. r * h + r - 1`` side by side, r times the inputs. The other way to pool,
  their mean, is one of the maps that this can express, so it could only fit worse.
- Neither count divides the other: refused, since no matching is better than another.
"""

from mappers.recipes.ridge import RidgeRecipe

HEAD_LOCAL = RidgeRecipe(name="head_local", structure="per_head")
