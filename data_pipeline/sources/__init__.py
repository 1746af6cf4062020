"""Where documents come from: one file per format of input. Each finds `Piece`s of files and reads the documents of a piece."""

from data_pipeline.sources import arrayrecord, arrow, flat, jsonl, megatron, parquet, text, tfds

_TEXT = (text.TEXT, jsonl.FORMAT, parquet.FORMAT, arrow.FORMAT, arrayrecord.FORMAT, tfds.FORMAT, text.PYTHON_STDLIB)
_TOKENS = (flat.NANOGPT, megatron.FORMAT, flat.OLMO)
FORMATS = {format.name: format for format in (*_TEXT, *_TOKENS)}
