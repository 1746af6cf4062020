"""Runs `prepare` on small inputs and reads back what it made."""

import itertools

import pytest

from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.tokenizer import load_tokenizer


class Prepared:
    """Each call prepares into a directory of its own below a folder."""

    def __init__(self, folder, capsys):
        self.folder, self._capsys, self._numbers = folder, capsys, itertools.count()

    def out(self, *arguments):
        """The directory of a command that succeeds."""
        out = self.folder / f"out{next(self._numbers)}"
        code = prepare.main([str(out), *map(str, arguments), "--workers", "1"])
        assert code == 0, self._capsys.readouterr().err
        return out

    def texts(self, *arguments):
        """The documents of a command that succeeds, decoded."""
        return self.read(self.out(*arguments))

    def read(self, out):
        shards, tokenizer = TokenShards.open(out, "full"), load_tokenizer(out)
        spans = [shards.document(number) for number in range(shards.num_documents)]
        return [tokenizer.decode(shards.read(first, length)) for first, length in spans]

    def uid(self, *arguments):
        return Manifest.load(self.out(*arguments)).uid

    def error(self, code, *arguments):
        """The message of a command that fails with this code, and leaves no manifest."""
        out = self.folder / f"out{next(self._numbers)}"
        self._capsys.readouterr()
        assert prepare.main([str(out), *map(str, arguments), "--workers", "1"]) == code
        error = self._capsys.readouterr().err
        assert "Traceback" not in error and not list(out.rglob("manifest.json"))
        return error


@pytest.fixture
def prepared(tmp_path, capsys):
    return Prepared(tmp_path / "prepared", capsys)
