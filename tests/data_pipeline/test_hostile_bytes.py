"""Damaged input of every kind that needs no extra: `prepare` succeeds or says what is wrong, and
never shows a traceback."""

import gzip
import json
import random
import struct

import numpy as np
import pytest

from data_pipeline.prepare import command as prepare
from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer, train_bpe

TEXTS = [f"document {n} é 東 \n" * (n % 5 + 1) for n in range(12)]
LINES = "".join(json.dumps({"text": text, "n": 1.5}) + "\n" for text in TEXTS).encode()
IDS = np.concatenate([[*text.encode(), 256] for text in TEXTS]).astype("<u2")
SIZES = [len(text.encode()) + 1 for text in TEXTS]
INDEX = b"".join([
    struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(SIZES), len(SIZES) + 1),
    np.array(SIZES, "<i4").tobytes(),
    (2 * (np.cumsum(SIZES) - SIZES)).astype("<i8").tobytes(),
    np.arange(len(SIZES) + 1).astype("<i8").tobytes(),
])  # fmt: skip
TEXT = {"a.txt": TEXTS[3].encode()}
BYTES = {"tokenizer.json": ByteTokenizer().content}
KINDS = {  # the file that is damaged, the others, and the arguments after OUT
    "text": ("a.txt", TEXTS[3].encode(), {}, ["--text", "{}/a.txt"]),
    "jsonl": ("a.jsonl", LINES, {}, ["--jsonl", "{}/a.jsonl"]),
    "gzip": ("a.jsonl.gz", gzip.compress(LINES, mtime=0), {}, ["--jsonl", "{}/a.jsonl.gz"]),
    "nanogpt": ("a.bin", IDS.tobytes(), BYTES, ["--nanogpt", "{}/a.bin", "--tokenizer", "{}"]),
    "megatron": ("a.idx", INDEX, BYTES | {"a.bin": IDS.tobytes()}, ["--megatron", "{}/a", "--tokenizer", "{}"]),
    "bpe": (
        "tokenizer.json", train_bpe(TEXTS, 280).content, TEXT, ["--text", "{}/a.txt", "--tokenizer", "{}"],
    ),
    "chars": (
        "tokenizer.json", CharTokenizer("".join(TEXTS), True).content, TEXT,
        ["--text", "{}/a.txt", "--tokenizer", "{}"],
    ),
}  # fmt: skip
PIECES = [
    b"\xff" * 8,
    b"\0" * 8,
    b"\xff\xff\xff\x7f\0\0\0\0",
    b"\0\0\0\0\0\0\0\x80",
    b"99999999",
    b"[[[[[[[[",
    b'"":null,',
    b"-1e999,",
]


def damage(rng, content):
    """The content cut short, or with a few bytes changed."""
    if rng.random() < 0.15:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(changed))
        piece = rng.choice(
            [
                bytes([changed[at] ^ 1 << rng.randrange(8)]),
                bytes([rng.randrange(256)]),
                rng.choice(PIECES),
            ]
        )
        changed[at : at + len(piece)] = piece
    return bytes(changed)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_is_used_or_told(tmp_path, capsys, kind):
    name, content, others, arguments = KINDS[kind]
    rng = random.Random(kind)
    for other, its_content in others.items():
        (tmp_path / other).write_bytes(its_content)
    command = [
        str(tmp_path / "out"),
        *(argument.format(tmp_path) for argument in arguments),
        "--workers",
        "1",
        "--overwrite",
    ]
    for case in range(12):
        (tmp_path / name).write_bytes(damage(rng, content) if case else content)
        code = prepare.main([*command, "--on-bad", rng.choice(["raise", "skip", "replace"])])
        error = capsys.readouterr().err
        assert code in ((0, 65) if case else (0,)), error
        assert "Traceback" not in error and ("error: " in error) == (code == 65), error
