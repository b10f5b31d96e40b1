"""Which windows are held out of a fit, and the KL of mappers on them."""

import pytest
import torch

from mappers.arms import CONTINUATION_TOKENS, Reading, read_document
from mappers.corpus import Corpus
from mappers.errors import NonFinite, TooFewData
from mappers.held_out import TOKENS_AT_LEAST, held_out_kl, hold_out
from mappers.mapper import AffineMap, LayerMap, Mapper
from mappers.metrics import Reference
from mappers.models import LoadedModel
from mappers.prefixes import ExactPrefixes
from mappers.translate import Translator


def corpus(names: str, *, tokens: int = 80) -> Corpus:
    """One window for each letter, of the document of that name."""
    windows = tuple(torch.full((tokens,), number) for number in range(len(names)))
    return Corpus(windows, tuple(names), frozenset(names))


def test_whole_documents_are_held_out_from_the_last_on() -> None:
    fitted, held_out = hold_out(corpus("abcdefghabcdefghabcdefgh"))
    assert "".join(held_out.names) == "hhh"
    assert "".join(fitted.names) == "abcdefg" * 3
    assert [int(ids[0]) for ids in held_out.windows] == [7, 15, 23]


def test_of_one_document_the_last_windows_are_held_out() -> None:
    fitted, held_out = hold_out(corpus("a" * 17))
    assert [int(ids[0]) for ids in held_out.windows] == [15, 16]
    assert len(fitted.windows) == 15


def test_long_documents_are_passed_over_for_shorter_ones() -> None:
    fitted, held_out = hold_out(corpus("a" * 12 + "bbb" + "c" * 8 + "d"))
    assert "".join(held_out.names) == "bbbd"
    assert "".join(fitted.names) == "a" * 12 + "c" * 8


def test_of_documents_that_are_all_long_the_last_windows_are_held_out() -> None:
    fitted, held_out = hold_out(corpus("a" * 16 + "b" * 16))
    assert "".join(held_out.names) == "bbbb"
    assert "".join(fitted.names) == "a" * 16 + "b" * 12


def test_never_more_than_is_needed_to_judge() -> None:
    letters = "".join(chr(0x4E00 + number) for number in range(1000))
    assert len(hold_out(corpus(letters))[1].windows) == 32


@pytest.mark.parametrize(("names", "tokens"), [("a", 80), ("abcdefgh", TOKENS_AT_LEAST - 1)])
def test_too_little_to_hold_anything_out(names: str, tokens: int) -> None:
    with pytest.raises(TooFewData, match="held out of the fit; give more text, or name a recipe"):
        hold_out(corpus(names, tokens=tokens))


def test_a_longer_window_elsewhere_is_held_out_instead_of_those_that_are_too_short() -> None:
    mixed = corpus("abcdefgh", tokens=TOKENS_AT_LEAST - 1)
    windows = (*mixed.windows[:3], torch.full((TOKENS_AT_LEAST,), 3), *mixed.windows[4:])
    fitted, held_out = hold_out(Corpus(windows, mixed.names, mixed.document_digests))
    assert "".join(held_out.names) == "defgh"
    assert "".join(fitted.names) == "abc"


def copied(model: LoadedModel, scale: float) -> Mapper:
    """From the model to itself: every layer ``scale`` times its own keys and values."""
    width = model.identity.num_kv_heads * model.identity.head_dim
    affine = AffineMap(scale * torch.eye(width), torch.zeros(width))
    layers = tuple(LayerMap((n,), affine, affine) for n in range(model.identity.num_layers))
    return Mapper(
        model.identity, model.identity, "full_head", layers, ExactPrefixes(), skipped_positions=0
    )


def long_texts(target: LoadedModel) -> Corpus:
    generator = torch.Generator().manual_seed(1)
    windows = tuple(torch.randint(300, (n,), generator=generator) for n in (80, 96, 40))
    return Corpus(windows, ("a", "b", "too short"), frozenset("abc"))


def test_the_kl_is_that_of_the_evidence(target: LoadedModel) -> None:
    mappers, texts = [copied(target, scale) for scale in (1.0, 0.9)], long_texts(target)
    found = held_out_kl(mappers, target, target, texts, progress=False)
    assert found.shape == (2, 2)
    assert float(found[0].max()) < 1e-6
    expected = torch.zeros(2)
    for ids in texts.windows[:2]:
        length = len(ids) - CONTINUATION_TOKENS
        reading = read_document(
            target, target, Translator(mappers[1]), ExactPrefixes(), ids, (length,)
        )
        expected += torch.tensor([kl_of(target, reading, length, tail) for tail in (1, 32)]) / 2
    torch.testing.assert_close(found[1].float(), expected, rtol=1e-4, atol=1e-6)
    assert float(found[1].min()) > 1e-3


def kl_of(target: LoadedModel, reading: Reading, length: int, tail: int) -> float:
    from mappers.arms import read_tail

    answer = read_tail(target, [reading.prefix_known], reading.ids, length=length, tail=tail)[0]
    return Reference(reading.native_logits[0], reading.next_ids(length)).compare(answer).kl


def test_a_mapper_that_gives_nonsense_is_never_the_best(target: LoadedModel) -> None:
    mappers = [copied(target, scale) for scale in (1.0, float("nan"))]
    with pytest.raises(NonFinite):
        held_out_kl(mappers, target, target, long_texts(target), progress=False)
