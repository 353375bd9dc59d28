"""Recognition of secrets, for two uses: rejecting a configuration that holds one, and masking text.

A run stores and shows its configuration in many places: shared artifacts, records, reports, MLflow, Prefect, the model
card. So a configuration holds no secret; it names the environment variable that does. `refuse_secrets` enforces that
before anything is written; `mask` and `mask_text` are the second line of defence wherever something is written or
shown.

    names.py       keys whose value is a secret: `api_key`, `OPENAI_KEY`, `db.password`
    forms.py       secrets in text: tokens of known format, credentials in URLs, `password=…`
    data.py        nested data: the traversal that finds and masks secrets
    references.py  `env:NAME`, a value that is read from the environment at the moment of use
"""

from components.redaction.data import Secret, mask, refuse_secrets, secrets_in
from components.redaction.forms import MASK, mask_text
from components.redaction.names import is_secret
from components.redaction.references import dereference, reference, secret_variable

__all__ = [
    "MASK",
    "Secret",
    "dereference",
    "is_secret",
    "mask",
    "mask_text",
    "reference",
    "refuse_secrets",
    "secret_variable",
    "secrets_in",
]
