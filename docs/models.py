"""Tables of docs/reference/models.md: families of models as they are trained and served, from docs/results/models.json.

    python -m docs.models                                                        write the page
    python -m docs.models --measure --tokenizers DIR --vllm REGISTRY [NAME ...]  measure families, then write it

`--measure` needs the published tokenizers that `make test-models` downloads (DIR, by default ESPALIER_MODELS), TRL, and
`vllm/model_executor/models/registry.py` of vLLM. The measurements are those of tests/models/measured_families.py; a
family takes seconds, or a minute with a published tokenizer. NAME: families to measure, by default all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs.generated import DOCS, Generated, one_line, table

RECORD = DOCS / "results" / "models.json"
ANSWERS_CUT = "limits"
"""Check that warns for each random model, because it does not end its answers."""
PACKAGES = ("torch", "transformers", "peft", "trl")
Family = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="families to measure")
    parser.add_argument("--measure", action="store_true", help="measure before the page is written")
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("ESPALIER_MODELS"), metavar="DIR")
    parser.add_argument("--vllm", type=Path, metavar="REGISTRY", help="registry.py of vLLM's models")
    options = parser.parse_args(arguments)
    if options.measure:
        if options.tokenizers is None or options.vllm is None:
            parser.error("--measure needs --tokenizers DIR (or ESPALIER_MODELS) and --vllm REGISTRY")
        measure(options.names, options.tokenizers, options.vllm)
    for page in PAGES:
        page.write()


def measure(names: list[str], tokenizers: Path, registry: Path) -> None:
    """Measure families and what is refused, and record each result at once."""
    from tests.models import measured_families

    architectures = frozenset(
        re.findall(r'^    "(\w+)": \(', registry.read_text(encoding="utf-8").casefold(), re.MULTILINE)
    )
    known = {name: family for name, family in recorded()["families"].items() if name in measured_families.ROWS}
    for name in names or measured_families.ROWS:
        with tempfile.TemporaryDirectory() as folder:
            known[name] = measured_families.measure(name, Path(folder), tokenizers, architectures)
        sys.stderr.write(f"{name}\n")
        _record({each: known[each] for each in measured_families.ROWS if each in known}, recorded()["refused"])
    with tempfile.TemporaryDirectory() as folder:
        _record(recorded()["families"], dict(measured_families.refusals(Path(folder))))


def _record(families: dict[str, Family], refused: dict[str, str]) -> None:
    data = {"versions": {name: version(name) for name in PACKAGES}, "families": families, "refused": refused}
    RECORD.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def recorded() -> dict[str, Any]:
    """Return versions of packages, the recorded families by name, and the messages of what is refused."""
    if not RECORD.is_file():
        return {"versions": {}, "families": {}, "refused": {}}
    return dict(json.loads(RECORD.read_text(encoding="utf-8")))


# Templates


def templates() -> str:
    """Return the table of tokenizers and templates."""
    head = ["Family", "Model type", "Models", "Tokenizer and template", "Histories", "Reasoning", "Calls"]
    head += ["System role", "SFT masks"]
    return table(head, [_template(name, family) for name, family in recorded()["families"].items()])


def _template(name: str, family: Family) -> list[str]:
    chat = family["chat"]
    figures = family["certificate"]["checks"]["template"]["figures"]
    return [
        name,
        f"`{family['type']}`",
        family["models"],
        _origin(family["tokenizer"]),
        _histories(figures),
        f"`{chat['reasoning']['start'].strip()}`" + ", opened by the prompt" * chat["reasoning"]["opened"]
        if chat["reasoning"]
        else "–",
        f"`{chat['calls']}`" if chat["calls"] else "`pythonic`",
        "yes" if chat["system"] else "in the user's first message",
        _masks(family["masks"]),
    ]


def _origin(tokenizer: dict[str, str | None]) -> str:
    published, template = tokenizer["published"], tokenizer["template"]
    if tokenizer["shortened"]:
        return "bytes; shortened template"
    if template == "chatml":
        return "bytes; `model.chat_template=chatml`"
    text = f"published (`{published}`)" if published else "bytes"
    return f"{text}; {f'`{template}` of TRL' if template else 'its own template'}"


def _histories(figures: dict[str, int]) -> str:
    """Return the number of histories of an episode in one context, and with reasoning where it differs."""
    plain, thinking = figures["histories"], figures["histories_with_reasoning"]
    return f"{plain}" if plain == thinking else f"{plain}; {thinking} with reasoning"


def _masks(masks: dict[str, Any]) -> str:
    results = masks["conversations"]
    equal = sum(result == "equal" for result in results.values())
    source = "TRL's" if masks["by"] == "trl" else "the template's"
    return f"{equal} of {len(results)}, {source}"


# Computation


def computation() -> str:
    """Return the table of layers, exactness and gradients."""
    head = ["Family", "Layers", "Layout", "Attention", "Log-probabilities: trie", "padded rows", "transformers"]
    head += ["Gradient", "transformers", "Gradient of GRPO"]
    rows = [_computation(name, family) for name, family in recorded()["families"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in recorded()["versions"].items())
    return f"{table(head, rows)}\nMeasured with {versions}.\n"


def _computation(name: str, family: Family) -> list[str]:
    padded = family["layout"] == "padded"
    nats, padded_nats = (family["nats"], family.get("padded_nats"))
    return [
        name,
        ", ".join(family["attention"]) or "full attention",
        family["layout"],
        f"`{family['implementation']}`",
        "–" if padded else f"{nats:.1e}",
        f"{nats:.1e}" if padded else f"{padded_nats:.1e}",
        f"{family['plain_nats']:.1e}",
        f"{family['gradient']:.1e}",
        f"{family['plain_gradient']:.1e}",
        f"{family['grpo']['difference']:.1e}",
    ]


# Certificate and serving


def serving() -> str:
    """Return the table of certificates and engines, and the reasons of failures."""
    families = recorded()["families"]
    head = ["Family", "Certificate", "Embedded engine", "Architecture in vLLM", "Adapters of all layers in vLLM"]
    reasons: dict[str, list[str]] = {}
    for name, family in families.items():
        for check, result in family["certificate"]["checks"].items():
            if result["status"] in ("failed", "warned") and check != ANSWERS_CUT:
                text = f"`{check}` {result['status']}: {_escaped(result['reason'])}"
                reasons.setdefault(text, []).append(name)
        for kind, result in family["masks"]["conversations"].items():
            if result != "equal":
                reasons.setdefault(f"demonstrations ({kind}): {_escaped(result)}", []).append(name)
    notes = "".join(f"- {', '.join(names)}: {text}\n" for text, names in reasons.items())
    return f"{table(head, [_serving(name, family) for name, family in families.items()])}\n{notes}"


def _serving(name: str, family: Family) -> list[str]:
    certificate, vllm = family["certificate"], family["vllm"]
    statuses = {check: result["status"] for check, result in certificate["checks"].items() if check != ANSWERS_CUT}
    failed = [check for check, status in statuses.items() if status == "failed"]
    warned = [check for check, status in statuses.items() if status == "warned"]
    verdict = f"fails: {', '.join(failed)}" if failed else "passes"
    if certificate["refused"]:
        verdict = f"template and calls: {verdict}"
    known = f"`{vllm['architecture']}`" if vllm["known"] else f"no (`{vllm['architecture']}`)"
    return [
        name,
        verdict + (f"; warns: {', '.join(warned)}" if warned else ""),
        f"refused: {_escaped(certificate['refused'])}" if certificate["refused"] else "yes",
        known,
        "–" if not vllm["known"] else "refused: name layers" if vllm["all_linear"] else "yes",
    ]


def refused() -> str:
    """Return the list of what is refused, with the messages."""
    return table(["Refused", "Message"], [[what, _escaped(text)] for what, text in recorded()["refused"].items()])


def _escaped(text: str) -> str:
    """Return a message on one line, whose marks are no markup."""
    return re.sub(r"([\\<>*_`\[\]])", r"\\\1", one_line(text))


PAGE = "reference/models.md"
PAGES = [
    Generated(PAGE, "templates", templates),
    Generated(PAGE, "computation", computation),
    Generated(PAGE, "serving", serving),
    Generated(PAGE, "refused", refused),
]

if __name__ == "__main__":
    main(sys.argv[1:])
