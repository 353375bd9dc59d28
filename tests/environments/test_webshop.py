"""Web shop: HTML pages, searches, and the published score."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import urljoin

import pytest

from components.environments.tools import call
from components.environments.worlds.webshop import Webshop
from components.environments.worlds.webshop.__main__ import ShopServer, main
from components.environments.worlds.webshop.browser import Page
from components.environments.worlds.webshop.catalog import ATTRIBUTES, catalog, kinds, option_groups
from components.environments.worlds.webshop.goals import fits, judge
from components.environments.worlds.webshop.site import PageNotFound
from tests.environments import checks

ROOT = Path(__file__).parents[2]
SMALL = {"products": 1500, "train": 60, "heldout": 20}


@pytest.fixture(scope="module")
def shop() -> Webshop:
    return Webshop(**SMALL)


def search(words: str) -> dict:
    return call("search", {"query": words})


def click(label: str) -> dict:
    return call("click", {"label": label})


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_the_solver_buys_a_fitting_product_with_more_steps_at_higher_difficulty(shop):
    lengths: dict[int, list[int]] = {}
    for split in checks.SPLITS:
        for scenario in shop.scenarios(split):
            steps = checks.play(shop, scenario, shop.solve(scenario))
            last = steps[-1].info
            assert last["success"]
            assert last["score"] == last["progress"] == steps[-1].reward == 1.0
            assert last["invalid_actions"] == 0
            lengths.setdefault(scenario.difficulty, []).append(len(steps))
    means = [sum(lengths[level]) / len(lengths[level]) for level in sorted(lengths)]
    assert means == sorted(means)
    assert means[-1] > 2 * means[0]
    assert max(max(level_lengths) for level_lengths in lengths.values()) <= 12


def test_harder_goals_leave_fewer_products():
    fitting_counts: dict[int, list[int]] = {}
    for scenario in Webshop(products=3000, train=150).scenarios("train"):
        fitting = [product for product in catalog(0, 3000) if fits(scenario.input, product)]
        assert scenario.input["product"] in {product.code for product in fitting}
        fitting_counts.setdefault(scenario.difficulty, []).append(len(fitting))
    means = [sum(fitting_counts[level]) / len(fitting_counts[level]) for level in sorted(fitting_counts)]
    assert means == sorted(means, reverse=True)


def test_every_department_and_difficulty_occurs_and_goals_are_unique(shop):
    scenarios = [scenario for split in checks.SPLITS for scenario in shop.scenarios(split)]
    assert {scenario.type for scenario in scenarios} == {kind.department for kind in kinds().values()}
    assert set(Counter(scenario.difficulty for scenario in scenarios).values()) == {len(scenarios) // 5}
    asked = [json.dumps([scenario.input[key] for key in ("kind", "attributes", "options")]) for scenario in scenarios]
    assert len(set(asked)) == len(asked)


def test_random_actions_rarely_buy_well(shop):
    """Play uniformly random legal actions: searches for words of the request, and clicks on labels of the page."""

    def chance(draw, messages):
        page = messages[-1]["content"]
        labels = [
            label
            for label in re.findall(r"\[([^\[\]]+)\]", page)
            if not label.startswith("words:") and label != "Search"
        ]
        if "[words:" in page and (not labels or draw.random() < 0.3):
            return search(" ".join(draw.sample(messages[1]["content"].split("\n")[0].split(), 3)))
        return click(draw.choice(labels))

    assert checks.success_of(shop, shop.scenarios("train"), chance, turns=15) < 0.05


def test_buying_the_first_hit_is_not_enough(shop):
    wins = 0
    for scenario in shop.scenarios("train"):
        shop.reset(scenario)
        page = shop.step(search(scenario.input["request"])).observation[0]["content"]
        shop.step(click(re.findall(r"\[(P\d{6})\]", page)[0]))
        for value in scenario.input["options"].values():
            shop.step(click(value))
        wins += shop.step(click("Buy Now")).info["success"]
    assert wins / len(shop.scenarios("train")) < 0.6


def test_the_score_is_the_published_formula(shop):
    """Compare with the formula, over all choices of options of some products."""
    for scenario in shop.scenarios("train")[:20]:
        goal = scenario.input
        for product in shop.site.products[:100]:
            chosen = {label: values[len(scenario.id) % len(values)][0] for label, values in product.options}
            extra = sum(dict(values)[chosen[label]] for label, values in product.options)
            hits = len({*goal["attributes"]} & {*product.attributes}) + len(goal["options"].items() & chosen.items())
            hits += product.cents + extra <= 100 * goal["limit"]
            kind = 0.1 if product.department == goal["department"] else 0.0
            if (product.department, product.section) == (goal["department"], goal["section"]):
                kind = 1.0 if product.kind == goal["kind"] else 0.5
            right = kind * hits / (len(goal["attributes"]) + len(goal["options"]) + 1)
            assert judge(goal, product, chosen).score == pytest.approx(right)


def test_an_option_that_was_not_chosen_is_missing(shop):
    scenario = next(scenario for scenario in shop.scenarios("train") if scenario.difficulty == 2)
    actions = [
        action
        for action in shop.solve(scenario)
        if json.loads(action["tool_calls"][0]["function"]["arguments"]).get("label")
        not in scenario.input["options"].values()
    ]
    last = checks.play(shop, scenario, actions)[-1]
    assert not last.info["success"]
    assert (last.info["options"], last.info["attributes"], last.info["bought"]) == (0, 1, True)
    assert last.reward == pytest.approx(2 / 3)


def test_the_features_page_lists_every_attribute_and_no_lures(shop):
    product = shop.site.products[7]
    text = Page(shop.site.page(f"features?id={product.code}")).text
    names = [name for group in ATTRIBUTES.values() for names in group for name in names]
    assert {name for name in names if f"- {name}\n" in text + "\n"} == set(product.synonyms)
    description = Page(shop.site.page(f"description?id={product.code}")).text
    absent = {
        name for group in ATTRIBUTES.values() for names in group for name in names if names[0] not in product.attributes
    }
    assert any(name in description for name in absent)


def test_no_two_attributes_share_a_name_and_no_two_options_of_a_product_a_label():
    own = {names for group in ATTRIBUTES.values() for names in group}
    assert len({name for names in own for name in names}) == 3 * len(own)
    for product in catalog(3, 500):
        values = [value for _, group in product.options for value, _ in group]
        assert len(values) == len(set(values))
    assert {group for kind in kinds().values() for group in kind.options} == set(option_groups())


def test_navigation(shop):
    scenario = shop.scenarios("train")[0]
    shop.reset(scenario)

    def see(action) -> str:
        return shop.step(action).observation[0]["content"]

    first = see(search("shoes"))
    assert "Page 1 of 5. [Next >]" in first
    second = see(click("next >"))
    assert "Page 2 of 5. [< Prev] [Next >]" in second
    code = re.findall(r"\[(P\d{6})\]", second)[3]
    item = see(click(f"[{code.lower()}]"))
    assert "Price: " in item
    values = re.search(r"^color: (.*)$", item, re.MULTILINE)
    color = re.findall(r"\[(.*?)\]", values[1])[-1]
    assert f"[{color}] (chosen)" in see(click(color))
    assert see(click("Features")).count("\n- ") >= 5
    assert f"[{color}] (chosen)" in see(click("< Prev"))
    assert see(click("< Prev")) == second
    assert see(click("< Prev")) == first


def test_invalid_actions_are_explained_and_counted(shop, subtests):
    for action, error in [
        (click("Buy Now"), "error: no [Buy Now] on this page; there is nothing to click"),
        (search(" "), "error: no words"),
        (call("search", {}), "error: search: query: Field required"),
        (say("I will buy it."), "error: no action; say search[words] or click[label]"),
        (say("click[Next >]"), "error: no [Next >]"),
        (say("click[\ud83d]"), "error: no [?]"),
    ]:
        with subtests.test(error=error):
            shop.reset(shop.scenarios("train")[0])
            step = shop.step(action)
            assert step.observation[0]["content"].startswith(error)
            assert step.info["invalid_actions"] == 1
            assert not step.done


def test_a_search_needs_a_page_with_a_field(shop):
    shop.reset(shop.scenarios("train")[0])
    page = shop.step(search("tent")).observation[0]["content"]
    shop.step(click(re.findall(r"\[(P\d{6})\]", page)[0]))
    assert "click [Back to Search] first" in shop.step(search("tent")).observation[0]["content"]
    assert shop.step(click("Back to Search")).observation[0]["content"] == "[words: ____] [Search]"


def test_any_words_may_be_searched_for(shop, subtests):
    for words in [
        '"',
        "tent OR *",
        "NEAR(a b)",
        "title:tent",
        "<b>&amp;</b> tent",
        "\ud83d tent",
        "é" * 9,
        "a" * 50_000,
        "%",
    ]:
        with subtests.test(words=words[:60]):
            shop.reset(shop.scenarios("train")[0])
            text = shop.search(words)
            assert ("Found: " in text) == ("tent" in words)
            assert len(text) < 4000


def test_addresses_that_lead_nowhere_are_refused(shop, subtests):
    for address in [
        "", "nowhere", "item", "item?id=P1", "results?q=tent&page=0", "results?q=tent&page=99",
        "results?q=tent&page=x", "results?" + "&".join(f"a{n}=1" for n in range(50)), "buy?id=",
    ]:  # fmt: skip
        with subtests.test(address=address[:60]):
            with pytest.raises(PageNotFound):
                shop.site.page(address)
            with pytest.raises(PageNotFound):
                shop.site.order(address)


def test_lines_of_text_are_actions_too():
    text, tools = Webshop(**SMALL, actions="text"), Webshop(**SMALL)
    assert text.tools() == []
    assert [tool["function"]["name"] for tool in tools.tools()] == ["search", "click"]
    scenario = text.scenarios("train")[3]
    lines, calls = text.solve(scenario), tools.solve(scenario)
    assert lines[0]["content"].startswith("search[")
    assert lines[-1]["content"] == "click[Buy Now]"
    observations = [
        [step.observation[0]["content"] for step in checks.play(text, scenario, actions)] for actions in (lines, calls)
    ]
    assert observations[0] == observations[1]


def test_instances_share_products_and_index(shop):
    assert Webshop(**SMALL).site is shop.site
    assert Webshop(**{**SMALL, "seed": 1}).site.products != shop.site.products


def test_more_goals_than_products_are_refused():
    with pytest.raises(ValueError, match="100 products are too few"):
        Webshop(products=100, train=90, heldout=20)
    with pytest.raises(ValueError, match="'tools' or 'text'"):
        Webshop(**SMALL, actions="mouse")


def test_the_same_site_is_served_over_http(shop):
    """An HTTP client that follows links buys the same product as the environment's solver."""
    scenario = next(scenario for scenario in shop.scenarios("heldout") if scenario.difficulty == 4)
    with ShopServer(shop, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            assert server.url.startswith("http://127.0.0.1:")

            def fetch(address: str, data: bytes | None = None) -> tuple[str, Page]:
                with urllib.request.urlopen(urljoin(server.url, address), data, timeout=600) as reply:
                    return reply.url, Page(reply.read().decode())

            assert len(fetch("/")[1].links) == 60
            url, page = fetch(f"{scenario.id}/search")
            assert scenario.input["request"] in page.text
            for action in shop.solve(scenario):
                arguments = json.loads(action["tool_calls"][0]["function"]["arguments"])
                label = arguments.get("label", "").lower()
                if "query" in arguments:
                    url, page = fetch(urljoin(url, page.search(arguments["query"])))
                elif label in page.links:
                    url, page = fetch(urljoin(url, page.links[label]))
                else:
                    url, page = fetch(urljoin(url, page.buttons[label]), b"")
            assert "Score: 1.00" in page.text
            for address in ("nothing/search", f"{scenario.id}/nowhere", f"{scenario.id}/item?id=%3Cscript%3E"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    fetch(address)
        finally:
            server.shutdown()
            thread.join()


def test_the_command_serves_and_says_where():
    command = [sys.executable, "-m", "components.environments.worlds.webshop", "--port", "0", "--products", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if line.startswith("serving "))
            with urllib.request.urlopen(line.split()[4], timeout=600) as reply:
                assert b"What to buy" in reply.read()
        finally:
            process.kill()


def test_a_port_that_cannot_be_is_refused():
    assert main(["--port", "99999", "--products", "1000"]) == 2
