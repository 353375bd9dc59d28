"""Artifacts (the outputs of stages), their keys, and the store that holds them."""

from components.artifacts.files import store_uri
from components.artifacts.keys import stage_key
from components.artifacts.locks import lock_file
from components.artifacts.manifest import MANIFEST, MANIFEST_VERSION, Artifact, parse_manifest, read_artifact
from components.artifacts.store import Draft, Store, sync, sync_tree
from components.artifacts.times import Times

__all__ = [
    "MANIFEST",
    "MANIFEST_VERSION",
    "Artifact",
    "Draft",
    "Store",
    "Times",
    "lock_file",
    "parse_manifest",
    "read_artifact",
    "stage_key",
    "store_uri",
    "sync",
    "sync_tree",
]
