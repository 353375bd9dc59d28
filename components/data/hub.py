"""Datasets of the Hugging Face hub, streamed with the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from components.data.spec import SourceSpec
from components.errors import ResourceError
from components.redaction import mask_text

DEFAULT_SPLIT = "train"


def dataset_rows(spec: SourceSpec) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset of the hub. Raises ResourceError if the library is missing, or if the dataset, its
    configuration or its split cannot be loaded."""
    with _loading(spec):
        try:
            from datasets import load_dataset
        except ImportError:
            raise ResourceError(
                f"dataset = {spec.dataset}: the package `datasets` is missing. Install it with "
                "`pip install -e '.[hub]'`, or download the files and set path"
            ) from None
        yield from load_dataset(
            spec.dataset, spec.config, split=spec.split or DEFAULT_SPLIT, revision=spec.revision, streaming=True
        )


def commit(spec: SourceSpec) -> str:
    """Return the commit, configuration and split of a dataset of the hub, as text. Raises ResourceError if the hub
    cannot be reached."""
    from huggingface_hub import HfApi

    assert spec.dataset is not None
    with _loading(spec):
        sha = HfApi().dataset_info(spec.dataset, revision=spec.revision).sha
    return f"{sha}/{spec.config}/{spec.split or DEFAULT_SPLIT}"


@contextmanager
def _loading(spec: SourceSpec) -> Iterator[None]:
    """Convert errors of the hub and of its library to ResourceError."""
    import httpx

    try:
        yield
    except ResourceError:
        raise
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        raise ResourceError(
            f"dataset = {spec.dataset}: the Hugging Face hub did not return it "
            f"({type(error).__name__}: {mask_text(str(error).strip())[:500]}). Check name, config, split and the "
            "network connection (HF_TOKEN for private datasets), or download the files and set path"
        ) from None
