"""Where documents come from: one file per format of input. Each finds `Piece`s of files and reads the documents of a piece."""

from data_pipeline.sources import arrayrecord, arrow, jsonl, parquet, text, tfds

_ALL = (text.TEXT, jsonl.FORMAT, parquet.FORMAT, arrow.FORMAT, arrayrecord.FORMAT, tfds.FORMAT, text.PYTHON_STDLIB)
FORMATS = {format.name: format for format in _ALL}
