"""Sources of documents: one file per format of input. Each finds `InputRange`s of files and reads
the documents of a piece.
"""

from data_pipeline.sources import (
    arrayrecord,
    arrow,
    chat,
    flat,
    jsonl,
    megatron,
    parquet,
    preferences,
    prompts,
    text,
    tfds,
)

_RECORDS = (parquet.FORMAT, arrow.FORMAT, arrayrecord.FORMAT, tfds.FORMAT)
_CHATS = (chat.FORMAT, preferences.FORMAT, prompts.FORMAT)
_TEXT = (text.TEXT, jsonl.FORMAT, *_CHATS, *_RECORDS, text.PYTHON_STDLIB)
_TOKENS = (flat.NANOGPT, megatron.FORMAT, flat.OLMO)
FORMATS = {format.name: format for format in (*_TEXT, *_TOKENS)}
TOKEN_FORMATS = frozenset(format.name for format in _TOKENS)  # of ids of a tokenizer, not of text
