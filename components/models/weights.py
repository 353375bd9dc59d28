"""Preparation of model weights: each source becomes a local folder with config, safetensors and tokenizer.

`check_weights` checks quickly, before heavy imports, that `prepare` can succeed: weights available, enough disk space.
`prepare` converts or downloads once, under a lock; later calls return the cached folder. A merged model is
`W + (alpha / rank) · B @ A` (arXiv:2106.09685), computed by `trained_weights.changed_tensors` for both the sampling
engine and the exported model, so their weights are bit-identical.

Only safetensors are read from a hub or a folder; pickled checkpoints and a model's remote code are rejected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from components.artifacts import lock_file, sync_tree
from components.artifacts.keys import json_digest
from components.errors import ResourceError
from components.models import chat_template, packaged, quantized, random_weights
from components.models.attention import CHANGING, CHOSEN, implementation, refuse_by_length
from components.models.chatml import chatml_digest
from components.models.digests import belongs, damage, folder_digest, is_blob, read_record, write_record
from components.models.files import read_settings
from components.models.folder_limits import building, check_config, check_loaded, check_tokenizer
from components.models.gpus import unusable, visible_gpus
from components.models.spec import LocalModelSpec, ModelSpec
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)

CACHE = "models"
"""Folder of prepared weights below the root of a run."""
LOCK_TIMEOUT = 2 * 3600.0
"""Time limit in seconds to wait for another process that prepares the same weights."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Tokenizer files; a model folder needs at least one of them."""


def check_weights(spec: ModelSpec, cache: Path) -> None:
    """Raise ResourceError if `prepare(spec, cache)` would fail for lack of weights, a package, disk space or a chat
    template, SpecError for variables that the chat template does not read."""
    if spec.quantization != "none":
        quantized.check()
    if spec.source == "hub" and Path(spec.name).is_dir():
        _check_folder(Path(spec.name))
    elif (folder(spec, cache) / "config.json").is_file() and read_record(_record(folder(spec, cache))) is not None:
        pass
    elif spec.source == "package":
        _, size = packaged.files_of(spec)
        _check_room(cache, size, f"the converted weights of {spec.name}")
    elif spec.source == "hub":
        _check_hub(spec, cache)
    chat_template.check(spec, folder(spec, cache))


def folder(spec: LocalModelSpec, cache: Path) -> Path:
    """Return the local folder of the unquantized model; it may not exist yet."""
    if spec.source == "hub" and Path(spec.name).is_dir():
        return Path(spec.name)
    architecture = [spec.architecture.key_part()] if spec.architecture else []
    name = json.dumps([spec.source, spec.name, spec.revision, 1, *architecture])
    return cache / f"{spec.name.replace('/', '--')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def prepare(spec: ModelSpec, cache: Path) -> Path:
    """Return a local folder with `config.json`, `*.safetensors` and the tokenizer.

    A folder created by Espalier is verified (`digests`) and recreated if it is damaged. Raises ResourceError if the
    weights are not available, WaitTimeout if another process holds the lock for too long.
    """
    makers: dict[str, Callable[..., str | None]] = {
        "package": packaged.convert,
        "random": _make_random,
        "hub": _download,
    }
    target = folder(spec, cache)
    if target == Path(spec.name):
        _check_folder(target)
    else:
        _make_once(target, spec, cache, partial(makers[spec.source], spec))
    if spec.quantization != "none":
        target = derived(target, f"{spec.quantization}-{spec.dtype}", spec, cache, _round)
    if spec.changes_template:
        options = [spec.call_form, spec.keep_reasoning]
        parts = [spec.chat_template, spec.chat_template_kwargs, chatml_digest(), *options]
        digest = json_digest(parts)
        target = derived(target, f"chat-{digest[:16]}", spec, cache, _with_template)
    return target


def derived(base_dir: Path, label: str, spec: ModelSpec, cache: Path, make: Callable[..., None]) -> Path:
    """Return the folder that `make` makes once of the model in `base_dir`. label: what it changes, for the name. make:
    called with `spec`, `base_dir`, the draft folder to fill and the path of an earlier record."""
    target = cache / f"{base_dir.name}-{label}-{folder_digest(base_dir)[:16]}"
    _make_once(target, spec, cache, partial(make, spec, base_dir))
    return target


def _round(spec: ModelSpec, base_dir: Path, out: Path, record: Path) -> None:
    quantized.write(base_dir, out, spec.dtype)


def _with_template(spec: ModelSpec, base_dir: Path, out: Path, record: Path) -> None:
    for path in filter(Path.is_file, base_dir.iterdir()):
        _place(path, out / path.name)
    chat_template.write(spec, _read_tokenizer(base_dir), out)
    tokenizer = load_tokenizer(out)
    tokenizer.name_or_path = chat_template.name_of(spec, base_dir)  # for errors: `out` is a draft
    chat = ChatFormat(tokenizer)
    chat_template.check_options(spec, chat, base_dir.name)
    chat_template.declare_end(out, declared_end(base_dir), chat.end_id)


def _record(target: Path) -> Path:
    """Return the path of a created folder's record of digests."""
    return target.with_name(f".{target.name}.json")


def _make_once(target: Path, spec: ModelSpec, cache: Path, make: Callable[[Path, Path], str | None]) -> None:
    """Create a folder atomically, in one of the processes that need it; do nothing if it exists and is intact.

    make: called with the draft folder to fill and the path of an earlier record; returns the hub commit, if any.
    """
    if target.is_dir() and damage(_record(target), target) is None:
        return
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{target.name}.lock", "a+") as lock:
        lock_file(lock, f"the weights of {spec.name}", LOCK_TIMEOUT, logger.info)
        if target.is_dir():
            if (problem := damage(_record(target), target)) is None:
                return
            logger.warning("the model in %s is damaged and is recreated: %s", target, problem)
        check_weights(spec, cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".draft-") as temporary:
            draft = Path(temporary) / "model"
            draft.mkdir()
            revision = make(draft, _record(target))
            sync_tree(draft)
            # Record first: if the process dies in between, the old folder does not match the record.
            if changed := write_record(_record(target), draft, revision):
                logger.warning(
                    "%s differs from the model that was there before (%s): results with it may not repeat earlier ones",
                    *(target, changed),
                )
            if target.is_dir():
                os.rename(target, Path(temporary) / "damaged")
            os.rename(draft, target)


def load_model(base_dir: Path, *, dtype: str = "float32", device: str = "cpu", quantization: str = "none") -> Any:
    """Return the causal language model in `base_dir`, in evaluation mode. quantization: storage of its linear
    layers."""
    import torch
    from transformers import AutoModelForCausalLM

    from components.models import fused_norms

    check_config(Path(base_dir))
    if device == "cuda":  # cuDNN plans its attention anew for each length: 276 tokens/s on an H200, 1,108 without
        torch.backends.cuda.enable_cudnn_sdp(False)
    attention = implementation(model_config(Path(base_dir)))
    if quantization != "none":
        return quantized.load(base_dir, dtype=dtype, device=device, attention=attention)
    with building("the model of config.json", Path(base_dir)):
        model, loading = AutoModelForCausalLM.from_pretrained(
            base_dir,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    check_loaded(loading, Path(base_dir))
    model = model.to(device).eval()
    if model.device.type == "cuda":
        fused_norms.fuse(model)
    return model


def check_length(spec: ModelSpec, base_dir: Path) -> None:
    """Raise ResourceError if the model in `base_dir` is not exact for sequences of `model.max_length` tokens. Only
    models that may not be need heavy imports."""
    config = (base_dir / "config.json").read_text(encoding="utf-8", errors="replace")
    if any(f'"{kind}"' in config for kind in (*CHANGING, CHOSEN)):
        refuse_by_length(model_config(base_dir).get_text_config(), spec.max_length, spec.name)


def vocabulary(base_dir: Path) -> dict[str, int]:
    """Return the token ids of the tokenizer in `base_dir`, by token."""
    return dict(_read_tokenizer(Path(base_dir)).get_vocab())


def tokenizer_digest(base_dir: Path) -> str:
    """Return the SHA-256 of the tokenizer in `base_dir` and its chat template."""
    tokenizer = load_tokenizer(base_dir)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([rules, tokenizer.chat_template]).encode()).hexdigest()


def load_tokenizer(base_dir: Path) -> Any:
    """Return the tokenizer in `base_dir`. Raises ResourceError if it has no chat template."""
    tokenizer = _read_tokenizer(Path(base_dir), clean_up_tokenization_spaces=False)
    if not tokenizer.chat_template:
        raise ResourceError(
            f"the model in {base_dir} has no chat template, so it cannot follow a conversation: choose an instruct "
            "model, or give a base model one: model.chat_template=chatml, or the path of a Jinja file"
        )
    return tokenizer


def _read_tokenizer(base_dir: Path, **options: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    check_tokenizer(base_dir)
    try:
        with building("the tokenizer of tokenizer_config.json", base_dir):
            tokenizer = AutoTokenizer.from_pretrained(base_dir, trust_remote_code=False, **options)
            return tokenizer if _preserves(tokenizer) else _as_stored(tokenizer, base_dir, **options)
    except ResourceError:
        path = base_dir / "tokenizer.json"
        if path.is_file():
            with building("the tokenizer of tokenizer.json", base_dir):  # names the other file if this one is damaged
                Tokenizer.from_file(str(path))
        raise


def _as_stored(tokenizer: Any, base_dir: Path, **options: Any) -> Any:
    """Return the tokenizer of tokenizer.json itself if it preserves text that `tokenizer` changes: the class that
    DeepSeek-R1's distillates name in tokenizer_config.json replaces rules of the file, and drops all space."""
    from transformers import PreTrainedTokenizerFast

    if not (base_dir / "tokenizer.json").is_file():
        return tokenizer
    stored = PreTrainedTokenizerFast.from_pretrained(base_dir, **options)
    return stored if _preserves(stored) else tokenizer


def _preserves(tokenizer: Any) -> bool:
    """Return True if a tokenizer gives a text back."""
    text = "It is here:\n\nGrüße, 漢字"
    return bool(tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text)


def model_config(base_dir: Path) -> Any:
    """Return transformers' configuration of the model in `base_dir`."""
    from transformers import AutoConfig

    check_config(base_dir)
    with building("the configuration of config.json", base_dir):
        return AutoConfig.from_pretrained(base_dir, trust_remote_code=False)


def declared_end(base_dir: Path) -> int | list[int] | None:
    """Return the tokens that the model's files declare as the end of a response."""
    path = base_dir / "generation_config.json"
    if not path.is_file():  # use the model's configuration, as transformers does
        path = base_dir / "config.json"
    with building(f"the configuration of {path.name}", base_dir):
        end = read_settings(path).get("eos_token_id")
    tokens = end if isinstance(end, list) else [end]
    if end is not None and any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        raise ResourceError(f"{path}: eos_token_id = {end!r:.100}: expected a token id, or a list of them")
    return cast("int | list[int] | None", end)


def pick_device(device: str) -> str:
    """Resolve `auto`: CUDA if this machine has a GPU, else the CPU. Raises ResourceError for a GPU that torch cannot
    use, and for `cuda` without one."""
    if device == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if visible_gpus():
        raise ResourceError(f"device = {device!r}: {unusable(torch.__version__, torch.version.cuda)}")
    if device == "auto":
        return "cpu"
    raise ResourceError(f"device = {device!r}: torch {torch.__version__} sees no CUDA device here; use auto or cpu")


def _check_room(cache: Path, size: int, content: str) -> None:
    existing = next(parent for parent in [cache, *cache.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size * 1.1:
        raise ResourceError(
            f"not enough disk space under {cache}: {content} take {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free. "
            "Free some, or set root=DIR to a folder on a larger disk"
        )


def _check_folder(path: Path) -> None:
    """Raise ResourceError if a local folder is not a readable model."""
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    files = {file.name for file in path.glob("*.safetensors")}
    if not files:
        missing.append("*.safetensors (pickled weights are not read: load them elsewhere and save them as safetensors)")
    if (index := path / "model.safetensors.index.json").is_file():
        missing += sorted(set(read_settings(index)["weight_map"].values()) - files)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ResourceError(f"model.name: the folder '{path}' holds no model; it lacks {', '.join(missing)}")


def _check_hub(spec: ModelSpec, cache: Path) -> None:
    from httpx import HTTPError
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        for name in ("model.safetensors", "model.safetensors.index.json"):
            if isinstance(try_to_load_from_cache(spec.name, name, revision=spec.revision), str):
                return
        info = HfApi().model_info(spec.name, revision=spec.revision, timeout=10, files_metadata=True)
    except HFValidationError as error:
        raise ResourceError(
            f"model.name: '{spec.name}' is neither a folder nor a Hugging Face name ({error})"
        ) from None
    except (HTTPError, OSError) as error:
        raise ResourceError(
            f"model.name: '{spec.name}' is no local folder, is not in the Hugging Face cache, and the hub does not "
            f"give it ({type(error).__name__}). Check the name and the network, or set model.name to a local folder"
        ) from None
    files = [file for file in info.siblings or [] if _wanted(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise ResourceError(f"model.name: '{spec.name}' has no safetensors weights; pickled weights are not read")
    _check_room(cache, sum(file.size or 0 for file in files), f"the weights of {spec.name}")


def _wanted(file: str) -> bool:
    """Return True for files of a hub repository to download: model files at its root."""
    return "/" not in file and belongs(file)


def _download(spec: ModelSpec, out: Path, record: Path) -> str | None:
    """Fill a folder from the hub, at the commit of an earlier record if there is one. Return the commit."""
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    revision = (read_record(record) or {}).get("revision") or spec.revision

    def fetch(force: bool) -> tuple[Path, list[Path], list[Path]]:
        """Return the snapshot folder, its files, and the damaged ones."""
        snapshot = Path(
            snapshot_download(
                spec.name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
                force_download=force,
            )
        )
        files = [file for file in sorted(snapshot.iterdir()) if _wanted(file.name)]
        return snapshot, files, [file for file in files if not is_blob(file.resolve())]

    try:
        # Through the hub's own cache, which also works offline.
        snapshot, files, damaged = fetch(force=False)
        if damaged:
            logger.warning("%s in the Hugging Face cache is damaged; it is downloaded again", damaged[0])
            snapshot, files, damaged = fetch(force=True)
        if damaged:
            raise ResourceError(f"model.name: {damaged[0]} still differs from the hub's digest: check the disk")
        for file in files:
            _place(file.resolve(), out / file.name)
    except ResourceError:
        raise
    except (HTTPError, OSError) as error:
        raise ResourceError(
            f"model.name: the download of '{spec.name}' failed ({type(error).__name__}: {error}). Check the network "
            "and the disk, or set model.name to a local folder"
        ) from error
    _check_folder(out)
    return snapshot.name


def _place(file: Path, target: Path) -> None:
    """Hard-link the file to `target`, or copy it to another disk."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _make_random(spec: ModelSpec, out: Path, record: Path) -> None:
    random_weights.make(out, spec.architecture)
