"""Configuration of a run as its export describes it."""

from __future__ import annotations

from typing import Any

from components.evaluation.spec import EvaluateSpec
from flows.experiment.spec import ExperimentSpec

_IRRELEVANT = {"certify", "early_stopping", "guards", "seeds", "store", "calibrate", "serve"}
_UNREAD = {"approve", "approve_timeout", "margin", "target", "canary"}
"""Keys of `deploy` about what follows the export."""


def exported_config(spec: ExperimentSpec) -> dict[str, Any]:
    """Return the composed config for the model card, as JSON data.

    The export depends on the policy, which is an input of its stage. It does not depend on the rules that ended the
    rounds, on the place, or on the deployment of the export, so those keys are left out, and with them of the stage
    key."""
    config = spec.model_dump(
        mode="json", by_alias=True, exclude={**dict.fromkeys(_IRRELEVANT, True), "deploy": _UNREAD}
    )
    if spec.collect.partial is None:
        del config["collect"]["partial"]
    config["evaluate"] = EvaluateSpec.declared(config["evaluate"])
    del config["evaluate"]["every"]
    if spec.evaluate.samples == 1:
        del config["evaluate"]["samples"]
    del config["data"]
    if spec.data.is_set:
        config["data"] = spec.data.meaning()  # its content is that of the policy
    del config["judge"]["ahead"]
    config["deploy"] = {key: value for key, value in config["deploy"].items() if key not in _UNREAD}
    return config
