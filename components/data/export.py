"""Export of scored trajectories as rows of a form, with a data set card.

    DIR/train.jsonl or DIR/train.parquet    the rows
    DIR/README.md                           the card: counts, provenance, how to read it

Only finished, scored trajectories are exported. A form of conversations cannot express an episode of several histories,
so such episodes are left out and counted; the form `trajectories` (`parquet`) holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from components.data.forms import FORMS
from components.data.forms.writing import only_conversation
from components.errors import ResourceError
from components.trajectories.convert import write_jsonl
from components.trajectories.groups import aside
from components.trajectories.schema import Message, Trajectory
from components.trajectories.store import write_trajectories

Writer = Callable[[list[Trajectory]], Iterable[dict[str, Any]]]
"""Makes the rows of the scored episodes of a group."""
Expresses = Callable[[Trajectory, Sequence[Message]], bool]
PARQUET = "parquet"
CARD = "README.md"


@dataclass(frozen=True)
class Collection:
    """Trajectories of one collection, with their rewards."""

    label: str
    """Stage of the run that scored them."""
    trajectories: Iterable[Trajectory]


@dataclass
class ExportCounts:
    """Counts of an export."""

    episodes: int = 0
    """Episodes read."""
    failed: int = 0
    unscored: int = 0
    low: int = 0
    """Episodes below the minimum reward."""
    several: int = 0
    """Episodes of several histories, which the form cannot express."""
    unfit: int = 0
    """Episodes of one history that give no row: parallel tool calls (`steps`), steps without rewards (`step_labels`),
    or scenarios without answers of different rewards (`preference`, `ranking`)."""
    exported: int = 0
    """Episodes that the rows are made from."""
    rows: int = 0


def export(
    collections: Sequence[Collection],
    form: str,
    out: Path,
    *,
    min_reward: float | None = None,
    write: Writer | None = None,
) -> ExportCounts:
    """Write the rows to a new folder, and return the counts. write: rows of a group; None: those of the form. Raises
    ResourceError if the folder is not empty, if a group cannot be written, or if no row results."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ResourceError(f"--out {out}: is not empty; expected a new folder")
    out.mkdir(parents=True, exist_ok=True)
    counts = ExportCounts()
    expresses = None if form == PARQUET else FORMS[form].expresses
    trajectories = _selected(collections, counts, min_reward, expresses)
    file = out / ("train.parquet" if form == PARQUET else "train.jsonl")
    if form == PARQUET:
        counts.rows = write_trajectories(file, trajectories)
    else:
        counts.rows = write_jsonl(file, _rows(trajectories, counts, write or FORMS[form].write))
    if not counts.rows:
        file.unlink()  # a corrected command may use the folder
        raise ResourceError(
            f"no row of form {form} results from {counts.episodes} episodes ({counts.failed} failed, "
            f"{counts.unscored} unscored, {counts.low} below --min-reward, {counts.several} of several histories, "
            f"{counts.unfit} that the form cannot express)"
        )
    return counts


def _rows(trajectories: Iterable[Trajectory], counts: ExportCounts, write: Writer | None) -> Iterator[dict[str, Any]]:
    assert write is not None
    for _, members in groupby(trajectories, key=lambda trajectory: trajectory.group):
        group = list(members)
        try:
            rows = list(write(group))
        except ValueError as error:
            raise ResourceError(f"the rows cannot be written: {error}") from None
        counts.exported += len(group) if rows else 0
        counts.unfit += 0 if rows else len(group)
        yield from rows


def _selected(
    collections: Sequence[Collection], counts: ExportCounts, min_reward: float | None, expresses: Expresses | None
) -> Iterator[Trajectory]:
    """Yield the trajectories to export. Scenarios of several collections are separate groups. expresses: that of the
    form; None if it expresses every episode."""
    for collection in collections:
        for trajectory in collection.trajectories:
            counts.episodes += 1
            if trajectory.failure is not None:
                counts.failed += 1
            elif trajectory.reward is None:
                counts.unscored += 1
            elif min_reward is not None and trajectory.reward < min_reward:
                counts.low += 1
            elif expresses is not None and not (messages := only_conversation(trajectory)):
                counts.several += 1
            elif expresses is not None and not expresses(trajectory, messages):
                counts.unfit += 1
            else:
                counts.exported += expresses is None
                if len(collections) > 1:
                    trajectory = replace(trajectory, scenario=aside(trajectory.scenario, collection.label))
                yield trajectory


def card(name: str, form: str, counts: ExportCounts, provenance: Mapping[str, str]) -> str:
    """Return the data set card: Markdown with the YAML front matter of the hub. provenance: facts by name."""
    import_form = "trajectories" if form == PARQUET else form
    file = "train.parquet" if form == PARQUET else "train.jsonl"
    size = next((label for limit, label in _SIZES if counts.rows < limit), "n>1M")
    left_out = {
        "failed": counts.failed,
        "unscored": counts.unscored,
        "below the minimum reward": counts.low,
        "of several histories": counts.several,
        "that the form cannot express": counts.unfit,
    }
    facts = "\n".join(f"| {key} | {value} |" for key, value in provenance.items())
    omitted = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "none"
    return f"""---
pretty_name: {name}
size_categories:
- {size}
tags:
- espalier
configs:
- config_name: default
  data_files:
  - split: train
    path: {file}
---

# {name}

{FORMS[import_form].summary[0].upper()}{FORMS[import_form].summary[1:]}; exported by Espalier.

| | |
|---|---|
| Rows | {counts.rows} |
| Episodes in them | {counts.exported} of {counts.episodes} |
| Left out | {omitted} |
| Form | `{import_form}` |
{facts}

## License

Not set. The rows contain text of the environment and of the model: choose a license that both permit, and add it as
`license` to the metadata of this card before you publish it.

## Use

```bash
python -m flows.run name=mine flow=offline data.path={file} data.form={import_form}
```
"""


_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a private data set repository of the Hugging Face hub, and return its URL. The token is that
    of HF_TOKEN or of `hf auth login`. Raises ResourceError if the hub refuses it."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=folder, commit_message="Export")
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(getattr(error, "server_message", None) or error).splitlines()[0][:300]
        raise ResourceError(
            f"--push {repository}: the hub did not accept the data ({reason}). Check the name and HF_TOKEN; the files "
            f"are in {folder}"
        ) from None
    return f"{api.endpoint}/datasets/{repository}"
