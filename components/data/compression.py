"""Decompressed content of files, in bounded memory.

An `.xz` or `.zst` file states the memory that decoding it takes, up to 4 GB; 128 MiB are the most that is used, twice
what the highest usual level needs.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Compressions by file suffix."""
MEMORY = 128 << 20
"""Maximum memory of a decoder in bytes."""
_BLOCK = 1 << 16


@contextmanager
def decompressed(filesystem: Any, path: str, compression: str | None) -> Iterator[IO[bytes]]:
    """Open the decompressed content of a file of fsspec."""
    if compression not in ("xz", "zstd"):
        with filesystem.open(path, "rb", compression=compression) as file:
            yield file
        return
    with filesystem.open(path, "rb") as file:
        if compression == "xz":
            stream: Any = _XzStream(file)
        else:
            import zstandard

            stream = zstandard.ZstdDecompressor(max_window_size=MEMORY).stream_reader(file, read_across_frames=True)
        with io.BufferedReader(stream, _BLOCK) as content:
            yield cast("IO[bytes]", content)


class _XzStream(io.RawIOBase):
    """Content of an `.xz` file, whose streams are decoded one after the other."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
        self._pending = b""
        """Bytes of the file for the decoder."""
        self._begun = True
        """True within a stream, False in the padding behind one."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decoder.eof:
                self._pending, self._begun = self._decoder.unused_data, False
                self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
            if self._decoder.needs_input and not self._pending:
                self._pending = self._file.read(_BLOCK)
                if not self._pending and self._begun:
                    raise EOFError("the compressed file ends before its end marker")
                if not self._pending:
                    return 0
            if not self._begun:
                self._pending = self._pending.lstrip(b"\0")
                if not self._pending:
                    continue
            data = self._decoder.decompress(self._pending, max_length=len(buffer))
            self._pending, self._begun = b"", True
            if data:
                buffer[: len(data)] = data
                return len(data)
