"""Make the shipped text: calibration samples and evaluation text from the language reference that CPython carries.

    python examples/make_calibration_text.py OUT_DIR

`pydoc_data.topics` is part of every CPython (PSF licence). Its topics overlap, so every paragraph is kept once only,
and the topics for evaluation come first: no paragraph of `eval.txt` is in `mix_calib.jsonl`. The same Python release
gives the same bytes; the committed files were made with 3.11.7.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

EVAL_TOPICS = (
    "assignment",
    "calls",
    "comparisons",
    "debugger",
    "execmodel",
    "formatstrings",
    "import",
    "naming",
    "raise",
    "strings",
    "try",
)
DOCUMENTS = 128


def is_prose(paragraph: str) -> bool:
    """True for running text: no heading, grammar rule, table or program listing."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) > 40 and letters > 0.75 * len(paragraph)


def paragraphs(topic: str) -> Iterator[str]:
    """Paragraphs of running text, each on one line."""
    for block in re.split(r"\n\s*\n", topics[topic].strip()):
        one_line = " ".join(block.split())
        if is_prose(one_line) and not re.search(r"\*{4}|={4}|-{4}|::=", one_line):
            yield one_line


def cut(kept: list[str], documents: int) -> Iterator[str]:
    """The paragraphs in order, cut between paragraphs into `documents` pieces of nearly equal length."""
    total = sum(map(len, kept))
    piece: list[str] = []
    made = done = 0
    for paragraph in kept:
        piece.append(paragraph)
        done += len(paragraph)
        if done >= total * (made + 1) / documents:
            yield "\n\n".join(piece)
            piece = []
            made += 1


def make(out_dir: Path) -> None:
    """Write `eval.txt`, topic after topic, and `mix_calib.jsonl`, shuffled so that a prefix of it is mixed as well."""
    seen: set[str] = set()
    evaluation: list[str] = []
    calibration: list[str] = []
    rest = sorted(set(topics) - set(EVAL_TOPICS), key=lambda topic: (len(topics[topic]), topic))
    for kept, names in ((evaluation, EVAL_TOPICS), (calibration, rest)):
        for topic in names:
            new = [paragraph for paragraph in paragraphs(topic) if paragraph not in seen]
            kept += dict.fromkeys(new)
            seen.update(new)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "eval.txt").write_text("\n\n".join(evaluation) + "\n", encoding="utf-8")
    mixed = sorted(cut(calibration, DOCUMENTS), key=lambda text: hashlib.sha256(text.encode()).digest())
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in mixed]
    (out_dir / "mix_calib.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    make(parser.parse_args().out_dir)
