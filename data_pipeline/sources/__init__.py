"""Where documents come from: one file per format of input. Each finds `Piece`s of files and reads the documents of a piece."""

from data_pipeline.sources import jsonl, text

FORMATS = {format.name: format for format in (text.TEXT, jsonl.FORMAT, text.PYTHON_STDLIB)}
