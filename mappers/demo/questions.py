"""Which sentence comes next? Multiple-choice questions from the embedded family's held-out text.

    .venv/bin/python -m mappers.demo.questions

writes ``text/next_sentence.jsonl``, a task file for ``kvt evaluate --tasks``. The wrong answers are
sentences of other documents of the same source, so style alone does not tell.
"""

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TEXT = Path(__file__).parent / "text"
QUESTIONS, CHOICES = 120, 4
CONTEXT_CHARACTERS, ANSWER_WORDS = 1_500, 12
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


class Passage(NamedTuple):
    """A text up to a sentence's end, and the first words of the next sentence."""

    source: str
    licence: str
    context: str
    answer: str


def passages(file: Path) -> list[Passage]:
    """One from the middle of each document that is long enough."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        ends = [match for match in _SENTENCE_END.finditer(document["text"])]
        ends = [match for match in ends if match.start() >= CONTEXT_CHARACTERS]
        for end in ends[len(ends) // 2 :]:
            words = _SENTENCE_END.split(document["text"][end.end() :], maxsplit=1)[0].split()
            if len(words) >= ANSWER_WORDS:
                context = document["text"][end.start() - CONTEXT_CHARACTERS : end.start()]
                answer = " ".join(words[:ANSWER_WORDS])
                found.append(Passage(document["source"], document["licence"], context, answer))
                break
    return found


def questions(found: list[Passage], chosen: random.Random) -> list[dict[str, object]]:
    """As many questions as ``QUESTIONS``, each with its source and licence."""
    by_source: dict[str, list[Passage]] = defaultdict(list)
    for passage in found:
        by_source[passage.source].append(passage)
    usable = [passage for passage in found if len(by_source[passage.source]) >= CHOICES]
    rows: list[dict[str, object]] = []
    for passage in chosen.sample(usable, min(QUESTIONS, len(usable))):
        others = [other.answer for other in by_source[passage.source] if other is not passage]
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
    (TEXT / "next_sentence.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
