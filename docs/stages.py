"""Table of the stages, in docs/reference/stages.md.

python -m docs.stages     write the table

Purposes are the first sentences of the stages' modules; keys are the fields of their specs.
"""

from __future__ import annotations

import sys

from docs.generated import Generated, one_line, table
from flows.stages import STAGES


def content() -> str:
    """Return the table."""
    rows = []
    for stage in STAGES.values():
        sentence = one_line(sys.modules[stage.spec.__module__].__doc__).partition(". ")[0].rstrip(".")
        purpose = sentence.partition(" stage: ")[2] or sentence
        keys = ", ".join(f"`{name.rstrip('_')}`" for name in stage.spec.model_fields)
        rows.append([f"`{stage.name}`", stage.kind.replace("_", " "), purpose[0].upper() + purpose[1:], keys])
    return table(["Stage", "Artifact", "Purpose", "Keys of its spec"], rows)


PAGE = Generated("reference/stages.md", "stages", content)

if __name__ == "__main__":
    PAGE.write()
