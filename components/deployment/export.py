"""Export: a trained policy as folders that other software can load, one per format.

    merged/     safetensors, config, tokenizer; the learned weights are merged into the base weights by the same
                function that the sampling engine uses, so both compute with the same bits
    adapter/    PEFT's LoRA folder with the tokenizer; loads on the base model, which it names. Of a policy with an
                adapter for each role, adapter/ROLE/
    gguf/       the merged model as one file (`components.deployment.gguf`)

The tokenizer's chat template is the one with which the policy was trained, tools included (`trajectories.portable`).
Decoders without effect are left out of `tokenizer.json`, because servers would misread its tokens in grammars
(`models.byte_level`).
Each folder has a README.md, the model card. Other files of the base model's folder (pickled weights, code) are not
exported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from components.deployment.gguf import write_gguf
from components.deployment.spec import Precision
from components.errors import ArtifactError, ResourceError
from components.exceptions import out_of_space
from components.json_text import read_json
from components.models import trained_weights
from components.models.byte_level import byte_level_tokenizer
from components.models.trained_weights import merge
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.portable import portable_template

logger = logging.getLogger(__name__)

_EXPORTED = (".safetensors", ".safetensors.index.json", ".json", ".jinja", ".model", ".txt")
_EXCLUDED = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_LEGAL = ("LICENSE", "LICENCE", "NOTICE")


def export_merged(base_dir: Path, folder: Path | None, out: Path, card: str) -> int:
    """Write the merged model with its card to the folder `out`; return its size in bytes.

    folder: learned weights of the policy (`models.learned`); None exports the base model. Raises ArtifactError if they
    do not fit the base model, or if the result would have no safetensors or no tokenizer.
    """
    base_dir, out = Path(base_dir), Path(out)
    with _atomic_folder(out):
        merge(base_dir, Path(folder) if folder else None, out)
        for path in sorted(base_dir.iterdir()):
            if path.is_file() and not _is_exported(path.name):
                logger.info("%s of the base model is not exported", path.name)
                (out / path.name).unlink(missing_ok=True)
        if not list(out.glob("*.safetensors")):
            raise ArtifactError(f"{base_dir} has no safetensors weights; pickled weights are not exported")
        if not (out / "tokenizer_config.json").is_file():
            raise ArtifactError(f"{base_dir} has no tokenizer_config.json: save its tokenizer with the model first")
        _write_tokenizer(base_dir, out)
        return _finish(out, card)


def export_adapter(base_dir: Path, folder: Path, out: Path, card: str, *, base: str, revision: str | None) -> int:
    """Write the adapter as a PEFT folder with the base model's tokenizer to `out`; return its size in bytes. Adapters
    of several roles have a folder for each.

    base, revision: name and revision of the base model, for the adapter's config. Raises ArtifactError if all weights
    were trained.
    """
    if roles := trained_weights.role_folders(folder):
        return sum(
            export_adapter(base_dir, path, out / role, card, base=base, revision=revision)
            for role, path in roles.items()
        )
    if trained_weights.is_whole(folder):
        raise ArtifactError(f"{folder} has all weights and no adapter; export it as merged")
    with _atomic_folder(out):
        config = read_json(folder / "adapter_config.json")
        config |= {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        shutil.copyfile(folder / "adapter_model.safetensors", out / "adapter_model.safetensors")
        for path in sorted(base_dir.iterdir()):
            if path.name in _TOKENIZER or path.name.startswith(_LEGAL):
                shutil.copyfile(path, out / path.name)
        _write_tokenizer(base_dir, out)
        return _finish(out, card)


@contextlib.contextmanager
def _atomic_folder(out: Path) -> Iterator[None]:
    """Create a folder to fill; remove it on failure. Raise ArtifactError if it is not empty, ResourceError if the disk
    is full."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ArtifactError(f"{out} is not empty; expected a new folder to export to")
    try:
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if (detail := out_of_space(error)) is not None:
            raise ResourceError(
                f"the export to {out} does not fit on the disk ({detail}) and was removed. Free space and run the same "
                "command again; it resumes from here"
            ) from error
        raise


def _write_tokenizer(base_dir: Path, out: Path) -> None:
    """Write the policy's chat template, and the tokenizer's file as servers read it."""
    if (text := byte_level_tokenizer(base_dir)) is not None:
        (out / "tokenizer.json").unlink()  # it may be the base model's own file
        (out / "tokenizer.json").write_text(text, encoding="utf-8")
    template = portable_template(ChatFormat(load_tokenizer(base_dir)))
    path, config = out / "chat_template.jinja", out / "tokenizer_config.json"
    path.unlink(missing_ok=True)
    path.write_text(template, encoding="utf-8")
    data = json.loads(config.read_text(encoding="utf-8"))
    if data.pop("chat_template", None) is not None:
        config.unlink()
        config.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_gguf(merged_dir: Path, out: Path, card: str, *, name: str, precision: Precision) -> int:
    """Write the merged model in `merged_dir` as `NAME-PRECISION.gguf` to `out`; return the folder's size in bytes."""
    with _atomic_folder(out):
        write_gguf(merged_dir, gguf_file(out, name, precision), name=name, precision=precision)
        for path in sorted(merged_dir.iterdir()):
            if path.name.startswith(_LEGAL):
                shutil.copyfile(path, out / path.name)
        return _finish(out, card)


def gguf_file(folder: Path, name: str, precision: Precision) -> Path:
    """Return the path of the GGUF file in an export folder."""
    return folder / f"{name}-{precision}.gguf"


def _finish(out: Path, card: str) -> int:
    readme = out / "README.md"
    readme.write_text(card, encoding="utf-8")
    for path in filter(Path.is_file, out.iterdir()):
        shutil.copymode(readme, path)  # safetensors writes files that only their owner can read
    return sum(path.stat().st_size for path in out.iterdir() if path.is_file())


def _is_exported(name: str) -> bool:
    return name.startswith(_LEGAL) or (name.endswith(_EXPORTED) and not name.endswith(_EXCLUDED))
