"""The tokenizer that a run carries in its folder, so that its model can be used without its data.

    RUN/tokenizer/tokenizer.json          as in the prepared data
    RUN/tokenizer/tokenizer_config.json   and the other files of BESIDE, as far as the data has them
    RUN/tokenizer/additional_chat_templates/SOURCE.jinja
                                          of each source that another template has rendered
    RUN/tokenizer/carried.json            what the manifests of the data say of the tokenizer and of
                                          conversations, with a digest of every file; written last

A folder without carried.json is incomplete. What carried.json says is checked whenever the
tokenizer is read.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from data_pipeline.base.errors import DataError, blame_storage
from data_pipeline.base.limited_files import MAX_TOKENIZER_BYTES, read_limited
from data_pipeline.base.remote import RemotePath, place
from data_pipeline.base.strict_json import MAX_FILE_BYTES, loads
from data_pipeline.shards import TOKENIZER, Manifest, write_atomic
from data_pipeline.shards.manifest import digest_of
from data_pipeline.tokenizer.base import Tokenizer
from data_pipeline.tokenizer.beside import CHAT_TEMPLATE, MORE_TEMPLATES, more_templates

FILE_NAME = "carried.json"
_VERSION = 1
_FIX = (
    "Copy the folder again from where the run was made, or run the training command again where "
    "its data is: it writes the folder anew."
)


@dataclasses.dataclass(frozen=True)
class TokenizerRecord:
    """The content of carried.json.

    Attributes:
        name: of the tokenizer, for people.
        sha256: the identity of the tokenizer.
        eod_id: the token that ends documents; None: there is none.
        files: the SHA-256 of each file beside carried.json, by its path below the folder.
        is_rendered: a chat template wrote text that was trained on.
        system: for each source of conversations, the system message of those that had none.
        is_imported: the run was made from a model of another program, so that texts begin as its
            tokenizer says.
    """

    name: str
    sha256: str
    eod_id: int | None
    files: Mapping[str, str]
    is_rendered: bool = False
    system: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_imported: bool = False

    @classmethod
    def load(cls, folder: Path | RemotePath) -> Self:
        """Read and check carried.json, and the digests of the files that it names.

        Raises:
            DataError: it is not there, or it or another file is not what was written.
        """
        path = folder / FILE_NAME
        try:
            content = loads(read_limited(path, MAX_FILE_BYTES))
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
            digest = content.pop("digest", None)
            if digest != digest_of(content):
                raise ValueError("its digest is not that of its content")
            version = content.pop("version", None)
            if version != _VERSION:
                raise ValueError(f"its version is {version}, and this program reads {_VERSION}")
            carried = cls(**content)
        except FileNotFoundError as error:
            raise DataError(f"{folder}: has no {FILE_NAME}. {_FIX}") from error
        except OSError as error:
            blame_storage(str(path), error)
            raise
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: is damaged ({error}). {_FIX}") from error
        for name, expected in carried.files.items():
            found = _sha256_of(folder / name)
            if found != expected:
                raise DataError(
                    f"{folder / name}: expected sha256 {expected}, found {found or 'no file'}: it "
                    f"is not what the run carries. {_FIX}"
                )
        return carried

    def to_bytes(self) -> bytes:
        """The content of the file."""
        content = {"version": _VERSION, **dataclasses.asdict(self)}
        content["digest"] = digest_of(content)
        return (json.dumps(content, indent=1) + "\n").encode()


def _sha256_of(path: Path | RemotePath) -> str:
    """The digest of a file; empty: it is not there."""
    try:
        return hashlib.sha256(read_limited(path, MAX_TOKENIZER_BYTES)).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        blame_storage(str(path), error)
        raise


def carry_data(folder: Path, sources: Mapping[str, str], beside: tuple[str, ...]) -> str:
    """Make a folder carry the tokenizer of prepared data, with its chat templates.

    Args:
        folder: RUN/tokenizer.
        sources: the directory or URL of each source, by name; all are of one tokenizer.
        beside: names of the files that go with a tokenizer.

    Returns:
        Why the folder was written although it was there; empty: it was new, or complete.

    Raises:
        DataError, StorageError: the data can't be read.
        OSError: the folder can't be written.
    """
    manifests = {name: Manifest.load(place(path)) for name, path in sources.items()}
    rendered = [name for name in sources if "chat_template" in manifests[name].settings]
    main = next(iter([*rendered, *sources]))
    content = {TOKENIZER: _read(place(sources[main]) / TOKENIZER)}
    for name in beside:
        found = _read_optional(place(sources[main]) / name)
        if found is not None:
            content[name] = found
    for file in more_templates(place(sources[main]) / TOKENIZER):
        content[f"{MORE_TEMPLATES}/{file.name}"] = _read(file)
    # Sources that one template has rendered need it once.
    known = {manifests[main].settings.get("chat_template")}
    for name in rendered:
        template = manifests[name].settings["chat_template"]
        found = _read_optional(place(sources[name]) / CHAT_TEMPLATE)
        if template not in known and found is not None:
            content[f"{MORE_TEMPLATES}/{_file_of_source(name, content)}"] = found
            known.add(template)
    entry = manifests[main].tokenizer
    carried = TokenizerRecord(
        name=entry["name"],
        sha256=entry["sha256"],
        eod_id=entry["special_ids"]["eod"],
        files=_digests(content),
        is_rendered=bool(rendered),
        system={name: manifests[name].settings.get("system", "") for name in rendered},
    )
    if carried.files[TOKENIZER] != carried.sha256:
        raise DataError(
            f"{sources[main]}/{TOKENIZER}: expected sha256 {carried.sha256}, found "
            f"{carried.files[TOKENIZER]}: not the tokenizer that this data was built with. Restore "
            "the file, or build the data again with `prepare --overwrite`."
        )
    return _write(folder, carried, content)


def _file_of_source(name: str, content: Mapping[str, bytes]) -> str:
    """The name of the file of a source's chat template, which is no name of a template that the
    tokenizer has or that transformers takes by itself."""
    file = f"{name}.jinja"
    while f"{MORE_TEMPLATES}/{file}" in content or file in ("default.jinja", "tool_use.jinja"):
        file = f"source-{file}"
    return file


def carry_imported(folder: Path, tokenizer: Tokenizer) -> None:
    """Make a folder carry the tokenizer of a model of another program."""
    content = {TOKENIZER: tokenizer.content, **tokenizer.beside}
    sha256 = tokenizer.sha256
    digests = _digests(content)
    carried = TokenizerRecord(tokenizer.name, sha256, tokenizer.eod_id, digests, is_imported=True)
    _write(folder, carried, content)


def _digests(content: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


def _write(folder: Path, carried: TokenizerRecord, content: Mapping[str, bytes]) -> str:
    """Write the files, carried.json last; returns as `carry_data`."""
    problem = ""
    if (folder / FILE_NAME).exists():
        try:
            if TokenizerRecord.load(folder).to_bytes() == carried.to_bytes():
                return ""
            problem = f"{folder}: the data says otherwise now. It is written anew."
        except DataError as error:
            problem = f"{error} It is written anew from the data."
    # Until the new one is there, the folder is incomplete.
    with contextlib.suppress(FileNotFoundError):
        (folder / FILE_NAME).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, data)
    write_atomic(folder / FILE_NAME, carried.to_bytes())
    return problem


def _read(path: Any) -> bytes:
    """The content of a file of data. DataError: it is not there; StorageError: it can't be read
    now."""
    content = _read_optional(path)
    if content is None:
        raise DataError(f"{path}: is not there. Build the data again with `prepare --overwrite`.")
    return content


def _read_optional(path: Any) -> bytes | None:
    """Read a file as `_read` does; None if there is no such file."""
    try:
        return read_limited(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        blame_storage(str(path), error)
        raise DataError(f"{path}: can't be read ({error.strerror}).") from error
