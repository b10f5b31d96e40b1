"""Which word, read before, comes next? Questions from the embedded family's held-out text.

    .venv/bin/python -m mappers.demo.questions

writes ``text/word_again.jsonl``, a task file for ``kvt evaluate --tasks``. Whoever has read the
context can know the answer: it is a word of it, not of its end. The wrong answers are such words of
other documents of the same source.
"""

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TEXT = Path(__file__).parent / "text"
QUESTIONS, CHOICES = 200, 4
CONTEXT_CHARACTERS, END_CHARACTERS = 1_200, 240
_WORD = re.compile(r"(?<= )[A-Za-z]{6,}(?=[ ,.;:])")


class Passage(NamedTuple):
    """A text that breaks off before a word that it has already had."""

    source: str
    licence: str
    context: str
    answer: str


def passages(file: Path) -> list[Passage]:
    """The first of each document that has one."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        for match in _WORD.finditer(document["text"], CONTEXT_CHARACTERS):
            context = document["text"][match.start() - CONTEXT_CHARACTERS : match.start()].rstrip()
            begun, end = context[:-END_CHARACTERS], context[-END_CHARACTERS:]
            if match[0] in _WORD.findall(begun) and match[0] not in end:
                found.append(Passage(document["source"], document["licence"], context, match[0]))
                break
    return found


def questions(found: list[Passage], chosen: random.Random) -> list[dict[str, object]]:
    """At most ``QUESTIONS``, each with its source and licence."""
    words: dict[str, set[str]] = defaultdict(set)
    for passage in found:
        words[passage.source].add(passage.answer)
    rows: list[dict[str, object]] = []
    for passage in chosen.sample(found, len(found)):
        others = sorted(word for word in words[passage.source] if word not in passage.context)
        if len(rows) < QUESTIONS and len(others) >= CHOICES - 1:
            choices = [passage.answer, *chosen.sample(others, CHOICES - 1)]
            chosen.shuffle(choices)
            rows.append(
                {
                    "source": passage.source,
                    "licence": passage.licence,
                    "question": passage.context,
                    "choices": choices,
                    "answer": choices.index(passage.answer),
                }
            )
    return rows


def main() -> None:
    """Write the file; the same every time."""
    rows = questions(passages(TEXT / "held_out.jsonl"), random.Random(0))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (TEXT / "word_again.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
