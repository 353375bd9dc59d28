"""Files of a source: on this machine, or at any place that fsspec opens.

Paths and URIs are expanded to a sorted list of files: a folder to the data files in it, a glob pattern to its matches.
The content digest depends on the content of the files and their order, not on their paths.

Content is decompressed in bounded memory. An `.xz` or `.zst` file states the memory that decoding it takes, up to 4 GB;
128 MiB are the most that is used, twice what the highest usual level needs.
"""

from __future__ import annotations

import hashlib
import io
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from components.data.spec import SourceSpec
from components.errors import ResourceError
from components.redaction import mask_text

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Formats by file suffix."""
_METADATA = {"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json", "manifest.json"}
"""Files that describe a folder of data and hold no rows."""
_GLOB = set("*?[")
_BLOCK = 2**20
_SHOWN = 5


@dataclass(frozen=True)
class DataFile:
    """One file of a source."""

    uri: str
    """Path on this machine, or URI."""
    filesystem: Any
    """Filesystem of fsspec."""
    path: str
    """Path in the filesystem."""
    format: str
    """Format: `jsonl`, `json`, `parquet`, `csv`, `arrow` or `text`."""

    @property
    def tab_separated(self) -> bool:
        """True for a file of format `csv` with tabs."""
        return _plain_suffix(self.path) == ".tsv"

    @property
    def compression(self) -> str | None:
        """Compression of the file as a whole; None for uncompressed files."""
        return COMPRESSIONS.get(PurePosixPath(self.path).suffix.lower())

    @property
    def local(self) -> Path | None:
        """Path of the file on this machine; None for other filesystems."""
        protocols = self.filesystem.protocol
        return Path(self.path) if "file" in ([protocols] if isinstance(protocols, str) else protocols) else None

    def size(self) -> int:
        """Return the size of the file in bytes, 0 if the filesystem does not state it."""
        with reading(self.uri):
            return int(self.filesystem.size(self.path) or 0)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the decompressed content. Raises ResourceError if it cannot be read."""
        with reading(self.uri), decompressed(self.filesystem, self.path, self.compression) as file:
            yield file


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Convert errors of filesystems and compressed streams to ResourceError, with the place that could not be read."""
    import lzma
    import zlib

    import zstandard

    try:
        yield
    except ResourceError:
        raise
    except FileNotFoundError:
        raise ResourceError(f"there is no file {mask_text(uri)}") from None
    except ImportError as error:
        raise ResourceError(f"{mask_text(uri)} cannot be read: {mask_text(str(error))}") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        reason = mask_text(str(error)) or type(error).__name__
        raise ResourceError(f"{mask_text(uri)} cannot be read: {reason}") from None


def data_files(spec: SourceSpec) -> list[DataFile]:
    """Return the files of `path`, sorted, of the split `split`. Raises ResourceError if there is none, or if the format
    of a file is unknown."""
    files = [file for place in spec.paths for file in _expanded(place, spec)]
    unique = list({file.uri: file for file in files}.values())
    chosen = unique if spec.split is None else [file for file in unique if _of_split(file, spec)]
    if not chosen:
        names = ", ".join(file.uri for file in unique[:_SHOWN])
        raise ResourceError(
            f"split = {spec.split}: no file of {_shown(spec.paths)} begins with {spec.split!r}; its files are {names}. "
            "Set path to the file, without a split"
        )
    formats = sorted({file.format for file in chosen})
    if len(formats) > 1:
        raise ResourceError(
            f"{_shown(spec.paths)} holds files of several formats ({', '.join(formats)}). Set format to one of them, "
            "or path to a pattern such as FOLDER/*.jsonl"
        )
    return chosen


def digest(files: Iterable[DataFile], on_block: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of the contents of the files, in order. on_block: called with the bytes of each block read."""
    whole = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with reading(file.uri), file.filesystem.open(file.path, "rb") as stream:
            while block := stream.read(_BLOCK):
                content.update(block)
                if on_block is not None:
                    on_block(len(block))
        whole.update(f"{file.format}\0{file.compression}\0{file.tab_separated}\0".encode() + content.digest())
    return whole.hexdigest()


def _expanded(place: str, spec: SourceSpec) -> Iterator[DataFile]:
    """Yield the files of one path, pattern or URI."""
    import fsspec

    local = "://" not in place
    uri = str(Path(place).expanduser().absolute()) if local else place
    with reading(uri):
        try:
            filesystem, path = fsspec.core.url_to_fs(uri)
        except ValueError as error:
            raise ResourceError(f"{mask_text(uri)} cannot be read: {mask_text(str(error))}") from None
        paths, folder = _listed(filesystem, path)

    def shown(name: str) -> str:
        return name if local else filesystem.unstrip_protocol(name)

    known = [(name, _format(name, spec.format)) for name in paths]
    if folder is not None:
        texts = {None} if spec.format == "text" else {None, "text"}  # such as a README
        known = [(name, format_) for name, format_ in known if format_ not in texts and _is_data(name, folder)]
    if not known:
        raise ResourceError(f"there are no data files at {mask_text(uri)}. Expected files {', '.join(SUFFIXES)}")
    for name, format_ in known:
        if format_ is None:
            raise ResourceError(
                f"{mask_text(shown(name))}: the format of the file is unknown. Set format to one of "
                f"{', '.join(dict.fromkeys(SUFFIXES.values()))}"
            )
        yield DataFile(shown(name), filesystem, name, format_)


def _listed(filesystem: Any, path: str) -> tuple[list[str], str | None]:
    """Return the files of a path, and the folder that was searched for them; None for a path of one file."""
    if filesystem.isfile(path):
        return [path], None
    if filesystem.isdir(path):
        return sorted(filesystem.find(path)), path
    if _GLOB & set(path):
        fixed = path[: min(path.index(sign) for sign in _GLOB & set(path))]
        return sorted(name for name in filesystem.glob(path) if filesystem.isfile(name)), fixed.rpartition("/")[0]
    raise FileNotFoundError(path)


def _is_data(name: str, folder: str) -> bool:
    """Return True for a file of a folder that holds rows, False for hidden files and metadata."""
    parts = PurePosixPath(name.removeprefix(folder)).parts
    return parts[-1] not in _METADATA and not any(part.startswith((".", "_")) for part in parts)


def _format(name: str, declared: str) -> str | None:
    own = SUFFIXES.get(_plain_suffix(name))
    if declared == "auto":
        return own
    return declared if own in (None, declared) or {own, declared} == {"json", "jsonl"} else None


def _plain_suffix(name: str) -> str:
    """Return the suffix of a file name without that of its compression."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _of_split(file: DataFile, spec: SourceSpec) -> bool:
    split = spec.split or ""
    *folders, name = PurePosixPath(file.path).parts[-2:]
    return name.startswith(split) or any(folder.startswith(split) for folder in folders)


def _shown(paths: list[str]) -> str:
    return ", ".join(map(mask_text, paths[:_SHOWN]))


COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Compressions by file suffix."""
MEMORY = 128 << 20
"""Maximum memory of a decoder in bytes."""
_XZ_BLOCK = 1 << 16


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
        with io.BufferedReader(stream, _XZ_BLOCK) as content:
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
                self._pending = self._file.read(_XZ_BLOCK)
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
