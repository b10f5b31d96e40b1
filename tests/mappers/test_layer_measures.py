"""Layers, queries and the curve against formulas written out by hand."""

import pytest
import torch

from mappers.arms import Reading, read_document, read_tail
from mappers.curve import layer_curve
from mappers.int8 import int8_weights, round_rows
from mappers.layer_measures import MEASURES, layer_rows, layer_sums
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.queries import read_queries
from mappers.translate import Translator
from tests.mappers.identities import broken_mapper

LENGTH = 64
TEXTS = torch.randint(1, 4_000, (2, LENGTH + 32), generator=torch.manual_seed(8))


def read_through_a_broken_layer(target: LoadedModel, ids: torch.Tensor) -> Reading:
    mapper = broken_mapper(target)
    return read_document(target, target, Translator(mapper), mapper.prefixes, ids, (LENGTH,))


@pytest.fixture(scope="module")
def readings(target: LoadedModel) -> list[Reading]:
    return [read_through_a_broken_layer(target, ids) for ids in TEXTS]


def test_queries_over_the_cache_give_the_models_own_attention(target: LoadedModel) -> None:
    ids, rows = TEXTS[0], torch.tensor([3, 40, 95])
    queries, scale = read_queries(target.model, ids, rows)
    hidden: list[torch.Tensor] = []
    layer = target.model.base_model.layers[2].self_attn.o_proj
    hook = layer.register_forward_pre_hook(lambda _, given: hidden.append(given[0][0]))
    with torch.inference_mode():
        cache = target.model(ids[None], use_cache=True)
    hook.remove()
    found = getattr(cache, "cache", None) or cache.past_key_values
    keys, values = (
        t[0].repeat_interleave(2, 0) for t in (found.layers[2].keys, found.layers[2].values)
    )
    for number, row in enumerate(rows.tolist()):
        scores = torch.einsum("hd,htd->ht", queries[2][number], keys[:, : row + 1]) * scale
        output = torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, : row + 1])
        torch.testing.assert_close(output.flatten(), hidden[0][row], rtol=1e-4, atol=1e-5)


def test_attention_is_left_as_it_was(target: LoadedModel) -> None:
    before = target.model(TEXTS[:1]).logits
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    read_queries(target.model, TEXTS[0], torch.tensor([5]))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert torch.equal(target.model(TEXTS[:1]).logits, before)


def test_measures_of_layers_are_those_of_their_definitions(
    target: LoadedModel, readings: list[Reading]
) -> None:
    rows = layer_rows([layer_sums(target, reading) for reading in readings], "a")
    got = {(r.layer, r.head, r.measure): r.value for r in rows}
    assert len(rows) == len(got) == 3 * 2 * len(MEASURES)
    assert {r.documents for r in rows} == {2}
    for layer in (0, 1):
        for head in (0, 1):
            errors, truths = [], []
            for reading in readings:
                own, other = reading.native.values[layer], reading.prefix_known.values[layer]
                truths.append(own[1:, head].double())
                errors.append(other[1:, head].double() - truths[-1])
            y, e = torch.cat(truths), torch.cat(errors)
            expected = 1 - e.square().sum() / (y - y.mean(0)).square().sum()
            assert got[layer, head, "r2_values"] == pytest.approx(expected.item(), abs=1e-5)
    # All but the values of layer 1 are right.
    for (layer, _, measure), value in got.items():
        if measure.startswith("r2_keys") or (measure == "r2_values" and layer != 1):
            assert value == pytest.approx(1, abs=1e-6)
        if measure == "attention_cosine":
            assert (value > 1 - 1e-6) is (layer != 1)
    assert max(got[1, head, "r2_values"] for head in (0, 1)) < 0.9


def test_concentration_is_that_of_the_paper(target: LoadedModel, readings: list[Reading]) -> None:
    reading = readings[0]
    noise = torch.randn(95, 2, 16, generator=torch.manual_seed(1)) * torch.arange(16)
    keys = reading.native.keys[0] + noise
    reading = _with(reading, keys)
    sums = layer_sums(target, reading)
    rows = torch.linspace(47, 94, 32).round().long()
    queries, scale = read_queries(target.model, reading.ids[:-1], rows)
    for head in (0, 1):
        e = (reading.prefix_known.keys[0] - reading.native.keys[0])[1:, head].double()
        concentrations = []
        for q in queries[0][:, 2 * head : 2 * head + 2].double().unbind(1):
            _, sigma, v = torch.linalg.svd(q, full_matrices=False)
            seen = (e @ v.T).square().mean(0)
            concentrations.append((sigma**2 @ seen) / (sigma**2).sum() / seen.mean())
        expected = torch.stack(concentrations).mean().item()
        assert sums["key_concentration"][0, head].item() == pytest.approx(expected, rel=1e-4)
        assert abs(expected - 1) > 0.01
    # Values of layer 1: the squared weights of the queries, over the tokens that were mapped.
    head, native = 1, reading.native
    e2 = (reading.prefix_known.values[1] - native.values[1])[1:, head].double().square().sum(-1)
    found = []
    for group in (2, 3):
        weights = torch.zeros(32, 95, dtype=torch.float64)
        for number, row in enumerate(rows.tolist()):
            scores = native.keys[1][: row + 1, head] @ queries[1][number, group] * scale
            weights[number, : row + 1] = scores.double().softmax(-1)
        a2 = weights.square()[:, 1:].mean(0)
        found.append((a2 @ e2) / a2.sum() / e2.mean())
    expected = torch.stack(found).mean().item()
    assert sums["value_concentration"][1, head].item() == pytest.approx(expected, rel=1e-4)


def _with(reading: Reading, keys: torch.Tensor) -> Reading:
    from dataclasses import replace

    known = reading.prefix_known
    exact = torch.cat([reading.native.keys[0][:1], keys[1:]])
    return replace(reading, prefix_known=replace(known, keys=(exact, *known.keys[1:])))


def test_the_curve_breaks_at_the_broken_layer(target: LoadedModel, readings: list[Reading]) -> None:
    rows = list(layer_curve(target, readings[0], document="d", domain="a", tail=4))
    kl = {(row.mode, row.layer): row.kl for row in rows}
    assert len(kl) == len(rows) == 6
    for place in (("one", 0), ("one", 2), ("up_to", 0)):
        assert kl[place] < 1e-6
    for place in (("one", 1), ("up_to", 1), ("up_to", 2)):
        assert kl[place] > 1e-3
    whole = read_tail(target, [readings[0].prefix_known], readings[0].ids, length=LENGTH, tail=4)[0]
    reference = Reference(readings[0].native_logits[0], readings[0].next_ids(LENGTH))
    assert kl["up_to", 2] == pytest.approx(reference.compare(whole).kl, rel=1e-3)


def test_int8_weights_are_multiples_of_a_127th_of_each_rows_largest(target: LoadedModel) -> None:
    weight = torch.tensor([[127.0, 1.4, -63.6], [0.0, 0.0, 0.0]])
    assert torch.equal(round_rows(weight), torch.tensor([[127.0, 1.0, -64.0], [0.0, 0.0, 0.0]]))
    rounded = int8_weights(target.model)
    own, other = (m.base_model.layers[0].mlp.up_proj.weight for m in (target.model, rounded))
    steps = other / (own.abs().amax(1, keepdim=True) / 127)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert not torch.equal(own, other)
    embeddings = (m.get_input_embeddings().weight for m in (target.model, rounded))
    assert torch.equal(*embeddings)
