"""Text to windows: nothing crosses a document, nothing depends on the order of files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mappers.corpus import (
    Document,
    calibration,
    evaluation,
    leading_tokens,
    read,
    refuse_overlap,
)
from mappers.errors import CorpusError


def documents(count: int, words: int = 300) -> list[Document]:
    return [
        Document(f"d{n}", " ".join(f"word{n} number {i}" for i in range(words)))
        for n in range(count)
    ]


def test_read_files_folders_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("second")
    (tmp_path / "sub" / "ignored.bin").write_bytes(b"\0")
    rows = [{"text": "third", "source": "s", "name": "n"}, {"text": "fourth", "source": "s"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = list(read([tmp_path, tmp_path / "a.txt"]))
    assert [d.text for d in found] == ["first", "third", "fourth", "second", "first"]
    assert [d.name for d in found[1:3]] == ["s/n", "c.jsonl:2"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"txt": "a"}'])
def test_bad_lines_are_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 2"):
        list(read([tmp_path / "c.jsonl"]))


def test_a_missing_path_is_an_error_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"^no such text file or folder: nothing\.txt$"):
        list(read([tmp_path / "nothing.txt"]))


def test_windows_are_the_documents_tokens_each_begun_by_the_bos(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    given = documents(3)
    corpus = calibration(given, tokenizer, window_tokens=100, windows=1_000)
    joined: dict[str, list[int]] = {}
    for name, window in zip(corpus.names, corpus.windows, strict=True):
        assert window[0] == 0
        assert 64 <= len(window) <= 100
        joined.setdefault(name, []).extend(window[1:].tolist())
    for document in given:
        whole = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        got = joined[document.name]
        assert got == whole[: len(got)]
        assert len(whole) - len(got) < 64


def test_every_document_gives_a_window_before_any_gives_two(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    corpus = calibration(documents(4), tokenizer, window_tokens=100, windows=6)
    assert len(corpus.windows) == 6
    assert sorted(corpus.names[:4]) == ["d0", "d1", "d2", "d3"]
    assert corpus.names[4:] == corpus.names[:2]


def test_the_sample_does_not_depend_on_order_or_repeats(tokenizer: PreTrainedTokenizerFast) -> None:
    given = documents(9)
    a, b, c = (
        calibration(order, tokenizer, window_tokens=80, windows=5)
        for order in (given, given[::-1], given + given)
    )
    assert a.digest == b.digest == c.digest
    assert len(a.document_digests) == 5
    other = calibration(given[:4], tokenizer, window_tokens=80, windows=5)
    assert other.digest != a.digest


def test_one_changed_token_changes_the_digest(tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = calibration(documents(2), tokenizer, window_tokens=80, windows=2)
    before = corpus.digest
    corpus.windows[1][5] += 1
    assert corpus.digest != before


def test_evaluation_takes_one_piece_of_each_document_the_longest_windows_first(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    given = [Document("a", "one two " * 200), Document("a", "three four " * 100)]
    given += [Document("b", "five six " * 60), Document("c", "short text")]
    corpus = evaluation(given, tokenizer, sizes=(64, 300), documents_at_most=9)
    assert corpus.names == ("a", "b")
    assert [len(ids) for ids in corpus.windows] == [300, 64]
    assert corpus.chosen == (frozenset({64, 300}), frozenset({64}))


def test_long_documents_are_not_preferred_for_short_prompts(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Each size has the documents with the smallest digests among those that are long enough."""
    given = [Document(f"d{n}", f"text{n} " * (50 + 150 * (n % 3 == 0))) for n in range(60)]
    tokens = {d.name: len(tokenizer(d.text)["input_ids"]) for d in given}
    ordered = [d.name for d in sorted(given, key=lambda d: d.digest)]
    corpus = evaluation(given, tokenizer, sizes=(80, 300), documents_at_most=8)
    for size in (80, 300):
        found = [
            name for number, name in enumerate(corpus.names) if corpus.stands_for(number, size)
        ]
        fitting = [name for name in ordered if tokens[name] >= size]
        assert sorted(found) == sorted(fitting[:8])
        assert len(fitting) > 8
    assert len(corpus.names) > 8
    assert all(max(c) == len(w) for c, w in zip(corpus.chosen, corpus.windows, strict=True))
    again = evaluation(given[::-1], tokenizer, sizes=(300, 80), documents_at_most=8)
    assert (again.digest, again.chosen) == (corpus.digest, corpus.chosen)


def test_overlap_is_refused_even_when_white_space_differs(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    given = documents(3)
    again = Document("renamed", given[1].text.replace(" ", "  \n"))
    calibrated = calibration(given, tokenizer, window_tokens=80, windows=3)
    digests = sorted(calibrated.document_digests)
    limits = {"sizes": (64, 80), "documents_at_most": 4}
    refuse_overlap(digests, evaluation(documents(5)[3:], tokenizer, **limits))
    with pytest.raises(CorpusError, match="1 evaluation documents"):
        refuse_overlap(digests, evaluation([again], tokenizer, **limits))


def test_text_without_a_window_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CorpusError, match="64 tokens"):
        calibration([Document("a", "too short")], tokenizer, window_tokens=100, windows=1)
    with pytest.raises(CorpusError, match="160 tokens"):
        evaluation(
            [Document("a", "too short")],
            tokenizer,
            sizes=(200, 160),
            documents_at_most=1,
        )


def test_leading_tokens_are_what_the_tokenizer_adds(tokenizer: PreTrainedTokenizerFast) -> None:
    assert leading_tokens(tokenizer) == (0,)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    bare.backend_tokenizer.post_processor = None
    assert leading_tokens(bare) == ()
    assert tokenizer("a")["input_ids"][0] == 0, "the shared tokenizer must be left as it was"


def test_windows_are_int64_on_the_cpu(tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = calibration(documents(1), tokenizer, window_tokens=80, windows=1)
    assert corpus.windows[0].dtype == torch.int64
    assert corpus.tokens == 80
