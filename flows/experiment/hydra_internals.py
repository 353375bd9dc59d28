"""Internals of Hydra that the project builds on. Only this module imports `hydra._internal`, which may change with any
release: `tests/flows/test_composition.py` names the version that they were checked with."""

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.grammar.functions import Functions
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Class of the launcher that runs the points of a sweep in this process, one after the other."""
__all__ = [
    "BASIC_LAUNCHER",
    "CachingConfigRepository",
    "ConfigLoaderImpl",
    "ConfigRepository",
    "Functions",
    "Hydra",
    "IConfigRepository",
    "create_config_search_path",
    "create_defaults_list",
]
