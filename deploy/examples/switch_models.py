"""A small model reads and writes, a large one goes on, without reading it all again.

    make serve                                            # in another terminal
    .venv/bin/python deploy/examples/switch_models.py     # or cell by cell: # %% begins one

A service that listens elsewhere is named as the argument.

The models are the embedded ones. For yours, name their folders or hub ids, and serve a mapper that
``kvt fit`` made of them.
"""

import sys
from pathlib import Path

import torch
from rich import print

import mappers.demo
from mappers import corpus, hf_compat
from mappers.models import ModelSpec, load_model
from service.client import Client
from service.hf import translate_cache, unread

# %% Two models of one family, and what each of them is
family = Path(mappers.demo.__file__).parent
small = load_model(ModelSpec(path=str(family / "small"), name="small"))
large = load_model(ModelSpec(path=str(family / "large"), name="large"))

# %% A prompt of 480 tokens
document = next(iter(corpus.read([family / "text" / "held_out.jsonl"])))
ids = small.tokenizer(document.text, return_tensors="pt", verbose=False)["input_ids"][:, :480]

# %% The small model reads it and writes 32 tokens
greedy = {"do_sample": False, "return_dict_in_generate": True}
turn = small.model.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, min_new_tokens=32, **greedy
)
ids = turn.sequences  # prompt and answer: what the large model is to go on from

# %% Its cache becomes the large model's, or None: then generate prefills, as it would anyway
with Client(next(iter(sys.argv[1:]), "http://127.0.0.1:8080")) as client:
    cache = translate_cache(
        hf_compat.cache_of(turn),
        client,
        source=small.identity,
        target=large.identity,
        prompt_ids=ids,
        domain="in_domain",
    )
print(f"{ids.shape[1]} tokens: the large model reads {unread(cache, ids).shape[1]} of them")

# %% The large model goes on
mask = torch.ones_like(ids)
over = hf_compat.cache_arguments(large.model, cache)
answer = large.model.generate(ids, attention_mask=mask, max_new_tokens=32, **greedy, **over)
print("over the translated cache:", large.tokenizer.decode(answer.sequences[0, ids.shape[1] :]))

# %% What it would have written after reading everything
native = large.model.generate(ids, attention_mask=mask, max_new_tokens=32, **greedy)
print("over its own:             ", large.tokenizer.decode(native.sequences[0, ids.shape[1] :]))
