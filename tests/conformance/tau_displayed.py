"""Reconstruction of the displayed retail conversations: they have the tool answers, but not the calls.

For each answer, the call is derived from the answer and the state of the records so far: a cancelled order from
`cancel_pending_order`, other items of a pending order from `modify_pending_order_items`, and so on. The derived call
must give the recorded answer, character by character. An answer from which no call follows (the value of an unknown
expression, most errors) is counted as not derivable.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.environments.tau_bench.data import read_domain
from components.environments.tau_bench.database import EpisodeDatabase
from components.environments.tau_bench.retail import RetailTools
from components.environments.tau_bench.toolset import Toolset
from components.environments.tools import InvalidAction, run_tool
from tests.conformance.tau_recorded import renamed

Call = tuple[str, dict[str, Any]]


def reconstruct(folder: str) -> dict[str, Any]:
    """Return counts and differences of the displayed retail conversations."""
    lines = (Path(folder).expanduser() / "retail" / "recorded_few_shot.jsonl").read_text().splitlines()
    tables = renamed(read_domain(folder, "retail").tables)
    tools: dict[str, Counter[str]] = {}
    differences: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for number, line in enumerate(lines):
        state = RetailTools(EpisodeDatabase(tables))
        for answer in answers(json.loads(line)["messages_display"]):
            call = derived(state, answer)
            if call is None:
                skipped["number" if _is_number(answer) else answer] += 1
                continue
            ours = run(state, *call)
            counts = tools.setdefault(call[0], Counter())
            counts["answers"] += 1
            counts["equal"] += ours == answer
            if ours != answer:
                differences.append({"conversation": number, "call": call, "recorded": answer, "ours": ours})
    totals = {key: sum(counts[key] for counts in tools.values()) for key in ("answers", "equal")}
    counts = {"conversations": len(lines), **totals, "not_derivable": sum(skipped.values())}
    return {**counts, "skipped": dict(skipped), "tools": tools, "differences": differences}


def answers(display: str) -> Iterator[str]:
    """Yield the tool answers of a displayed conversation."""
    for part in re.split(r"\n(?=(?:user|assistant|tool): ?)", display):
        if part.startswith("tool:"):
            yield part.removeprefix("tool:").removeprefix(" ")


def run(state: Toolset, name: str, arguments: dict[str, Any]) -> str:
    """Return the answer of a tool."""
    try:
        return run_tool(state, name, arguments)
    except InvalidAction as error:
        return f"Error: {error}"


def derived(state: Toolset, answer: str) -> Call | None:
    """Return the call that an answer follows from; None if there are several possible ones."""
    fixed: dict[str, Call] = {
        "": ("think", {"thought": ""}),
        "Transfer successful": ("transfer_to_human_agents", {"summary": ""}),
        "Error: order not found": ("get_order_details", {"order_id": "none"}),
        "Error: user not found": ("get_user_details", {"user_id": "none"}),
    }
    if answer in fixed:
        return fixed[answer]
    if user := state.database.get("users", answer):
        return "find_user_id_by_email", {"email": user["email"].upper()}
    record = None if answer.startswith("Error") or _is_number(answer) else json.loads(answer)
    if not isinstance(record, dict):
        return None
    if "order_id" in record:
        return _order(state, record)
    if "email" in record:
        return _user(state, record)
    if "variants" in record:
        return "get_product_details", {"product_id": record["product_id"]}
    return "list_all_product_types", {}


def _user(state: Toolset, record: dict[str, Any]) -> Call:
    key, known = next(item for item in state.database.records("users") if item[1]["email"] == record["email"])
    changed = known["address"] != record["address"]
    return ("modify_user_address", {"user_id": key, **record["address"]}) if changed else _details("user", key)


def _order(state: Toolset, record: dict[str, Any]) -> Call:
    key, known = record["order_id"], state.find("orders", record["order_id"])
    if record.get("cancel_reason") != known.get("cancel_reason"):
        return "cancel_pending_order", {"order_id": key, "reason": record["cancel_reason"]}
    if record["address"] != known["address"]:
        return "modify_pending_order_address", {"order_id": key, **record["address"]}
    if record["status"] == known["status"]:
        last = record["payment_history"]
        if len(last) == len(known["payment_history"]):
            return _details("order", key)
        return "modify_pending_order_payment", {"order_id": key, "payment_method_id": last[1]["payment_method_id"]}
    if "return_items" in record:
        return "return_delivered_order_items", {
            "order_id": key,
            "item_ids": record["return_items"][::-1],
            "payment_method_id": record["return_payment_method_id"],
        }
    if "exchange_items" in record:
        return "exchange_delivered_order_items", _exchange(state, record)
    pairs = [
        (old["item_id"], new["item_id"])
        for old, new in zip(known["items"], record["items"], strict=True)
        if old["item_id"] != new["item_id"]
    ] or [(known["items"][0]["item_id"],) * 2]
    return "modify_pending_order_items", {
        "order_id": key,
        "item_ids": [old for old, _ in pairs],
        "new_item_ids": [new for _, new in pairs],
        "payment_method_id": record["payment_history"][-1]["payment_method_id"],
    }


def _exchange(state: Toolset, record: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an exchange: the recorded lists are sorted, so the pairs follow from the products."""
    products = {item["item_id"]: item["product_id"] for item in record["items"]}
    new = list(record["exchange_new_items"])
    pairs = []
    for item in record["exchange_items"]:
        variants = state.find("products", products[item])["variants"]
        pairs.append(new.pop(next(place for place, other in enumerate(new) if other in variants)))
    return {
        "order_id": record["order_id"],
        "item_ids": record["exchange_items"],
        "new_item_ids": pairs,
        "payment_method_id": record["exchange_payment_method_id"],
    }


def _details(noun: str, key: str) -> Call:
    return f"get_{noun}_details", {f"{noun}_id": key}


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+", text) is not None
