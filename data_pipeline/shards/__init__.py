"""Token shards: the one training format, its writer, its reader and its checks.

A directory holds `NAME-00000.bin` (tokens, little-endian uint16 or uint32), `NAME-00000.idx`
(uint64 offset of each document's first token, then the number of tokens), `NAME-00000.mask` if not
every token of the shard is a training target (one bit per token, the lowest of a byte first, 1 for
a target), `NAME-00000.val` if its documents have a number each (little-endian float32: a label, or
the margin of a pair), `NAME-00000.cols` if they are prompts (of each, a JSON object in a line, with
what else is known of it), `NAME-00000.crc` (uint32 crc32 of every 1 MiB block of the .bin, then of
the .idx, the .mask, the .val and the .cols), a copy of the tokenizer, and `manifest.json`, which is
written last: a directory without it was never finished. The manifest holds a digest of
itself and of every .crc file, so a chain of digests leads from it to every byte. Documents never
cross shards. Knows nothing of batches, rows or tokenizers' insides.
"""

from data_pipeline.shards.checked import ranges
from data_pipeline.shards.files import (
    ATTEMPT,
    BLOCK_BYTES,
    move_into,
    write_atomic,
)
from data_pipeline.shards.manifest import MANIFEST, PARTS, TOKENIZER, VERSION, Manifest, ShardEntry
from data_pipeline.shards.reader import TokenShards
from data_pipeline.shards.writer import ShardWriter, token_dtype

__all__ = [
    "ATTEMPT", "BLOCK_BYTES", "MANIFEST", "PARTS", "TOKENIZER", "VERSION", "Manifest", "ShardEntry",
    "ShardWriter", "TokenShards", "move_into", "ranges", "token_dtype", "write_atomic",
]  # fmt: skip
