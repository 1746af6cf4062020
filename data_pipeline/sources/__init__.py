"""Where documents come from: one file per kind of input. Each lists `Piece`s of files and reads the documents of a piece."""
