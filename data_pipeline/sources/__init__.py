"""Where documents come from: one file per format of input. Each finds `Piece`s of files and reads the documents of a piece."""

from data_pipeline.sources import arrow, jsonl, parquet, text

FORMATS = {format.name: format for format in (text.TEXT, jsonl.FORMAT, parquet.FORMAT, arrow.FORMAT, text.PYTHON_STDLIB)}
