"""Product catalog, generated from a seed (10,000 products in well under a second).

A product has a kind (`running shoes`) within a section and a department. It has attributes, options with prices, and
texts: a title, a description and features. The texts use any of the synonyms of an attribute; the title names one or
two attributes, the features all. As in real shops, descriptions also name attributes that the product lacks: as missing
or as an attribute of another product.
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

ATTRIBUTES: dict[str, tuple[tuple[str, ...], ...]] = {
    "care": (
        ("fragrance free", "unscented", "without perfume"),
        ("cruelty free", "not tested on animals", "no animal testing"),
        ("vegan", "plant based", "nothing from animals in it"),
        ("for sensitive skin", "mild to delicate skin", "does not irritate"),
        ("long lasting", "lasts all day", "stays on for hours"),
        ("paraben free", "no parabens", "made without parabens"),
        ("dermatologist tested", "examined by skin doctors", "clinically examined"),
        ("fast absorbing", "sinks in quickly", "leaves no film"),
        ("alcohol free", "no alcohol", "made without alcohol"),
        ("moisturizing", "keeps skin from drying out", "hydrating"),
    ),
    "fabric": (
        ("machine washable", "goes into the washing machine", "laundry safe"),
        ("wrinkle free", "needs no ironing", "stays smooth"),
        ("breathable", "lets air through", "ventilated"),
        ("moisture wicking", "carries sweat away", "keeps you dry in sport"),
        ("stretchy", "elastic", "gives with every move"),
        ("organic cotton", "cotton grown without pesticides", "certified natural cotton"),
        ("fleece lined", "with a soft warm inside", "brushed inside"),
        ("zippered pockets", "pockets that close with a zip", "secure pockets"),
        ("wind proof", "keeps the wind out", "blocks gusts"),
        ("quick drying", "dries in an hour", "soon dry again"),
    ),
    "shoe": (
        ("non slip", "grips wet floors", "sure footed sole"),
        ("wide fit", "room for broad feet", "roomy toe box"),
        ("arch support", "holds up the instep", "shaped footbed"),
        ("water repellent", "keeps rain out", "sheds puddles"),
        ("memory foam", "cushion that takes your shape", "soft molded insole"),
        ("light as a feather", "under 200 grams", "ultralight"),
        ("slip on", "no laces needed", "on in a second"),
        ("reflective", "seen in the dark", "bright in headlights"),
        ("genuine leather", "real cowhide", "full grain hide"),
        ("shock absorbing", "softens every landing", "impact damping"),
    ),
    "device": (
        ("fast charging", "full in half an hour", "rapid charge"),
        ("noise cancelling", "shuts out the noise around you", "silences the surroundings"),
        ("wireless", "no cables", "cord free"),
        ("splash proof", "survives spilled water", "withstands splashes"),
        ("voice control", "obeys spoken commands", "hands free by speech"),
        ("long battery life", "runs for days", "30 hours on one charge"),
        ("high resolution", "razor sharp picture", "ultra fine detail"),
        ("compact", "fits in a pocket", "small footprint"),
        ("easy to install", "set up in minutes", "plug and play"),
        ("backlit", "lit from behind", "glows at night"),
    ),
    "kitchen": (
        ("dishwasher safe", "may go into the dishwasher", "cleans up in the dish machine"),
        ("non stick", "nothing burns on", "food slides off"),
        ("bpa free", "no bisphenol", "made without bisphenol"),
        ("heat resistant", "takes 250 degrees", "oven proof"),
        ("stackable", "sits on top of its own kind", "nests to save room"),
        ("stainless steel", "rust free metal", "inox"),
        ("leak proof", "not a drop gets out", "tight seal"),
        ("ergonomic handle", "sits well in the hand", "comfortable grip"),
        ("works on induction", "for magnetic hobs", "induction ready"),
        ("space saving", "folds flat", "collapsible"),
    ),
    "home": (
        ("easy to assemble", "put together in ten minutes", "no tools needed"),
        ("solid wood", "real timber throughout", "massive oak or beech"),
        ("adjustable height", "goes up and down", "raise it or lower it"),
        ("scratch resistant", "shrugs off scratches", "hard wearing surface"),
        ("with storage", "room inside for your things", "hidden drawer"),
        ("rounded corners", "no sharp edges", "safe for children"),
        ("on castors", "rolls wherever you want it", "with wheels"),
        ("holds 50 kilos", "bears heavy loads", "heavy duty"),
        ("foldable", "packs away in a moment", "collapses when not needed"),
        ("handmade", "crafted by hand", "each piece made by a craftsman"),
    ),
    "textile": (
        ("fade resistant", "keeps its color in the sun", "color fast"),
        ("hypoallergenic", "good for people with allergies", "dust mite free"),
        ("machine washable", "goes into the washing machine", "laundry safe"),
        ("reversible", "use either side", "two looks in one"),
        ("thick", "heavy weave", "dense pile"),
        ("stain resistant", "repels spots", "spills wipe off"),
        ("woven by hand", "from a hand loom", "hand woven"),
        ("light blocking", "keeps the room dark", "dims daylight"),
        ("sound absorbing", "makes rooms quieter", "muffles noise"),
        ("pure linen", "nothing but flax", "100% linen"),
    ),
    "camp": (
        ("waterproof", "no rain gets in", "sealed seams"),
        ("packs small", "tiny when rolled up", "compressible"),
        ("uv protection", "shields from the sun", "sun factor 50"),
        ("tear resistant", "ripstop cloth", "does not rip"),
        ("insulated", "keeps warm and cold apart", "thermal layer"),
        ("mosquito proof", "keeps insects out", "fine mesh against bites"),
        ("quick release", "opens with one hand", "one click buckle"),
        ("odor resistant", "stays fresh for weeks", "does not take on smells"),
        ("easy to clean", "wipes clean", "dirt slides off"),
        ("anti fog", "never mists over", "stays clear when you sweat"),
    ),
}
"""By set: attributes, each with the names that it goes by; the first is its own."""
OPTIONS = """
color: color: 0: black, white, navy, olive, burgundy, teal, sand, coral, charcoal, mustard, lilac, mint
clothing size: size: 150: x-small, small, medium, large, x-large, xx-large
shoe size: size: 0: 36, 37, 38, 39, 40, 41, 42, 43, 44, 45
scent: scent: 0: lavender, cedar, citrus, vanilla, rose, sea salt, green tea, almond
pack: pack: 700: single, pack of 2, pack of 3, pack of 6, pack of 12
persons: for: 2500: 1 person, 2 persons, 3 persons, 4 persons, 6 persons
extra: with: 400: nothing else, a cover, a stand, a wall hook, a travel bag
storage: storage: 2500: 32 gb, 64 gb, 128 gb, 256 gb, 512 gb
cable: plug: 0: type a, type c, type f, type g
capacity: capacity: 400: 0.5 liter, 1 liter, 1.5 liter, 2 liter, 3 liter
finish: finish: 900: oak, walnut, birch, cherry, ash, maple
width: width: 1200: 40 cm, 60 cm, 80 cm, 100 cm, 120 cm
"""
"""Groups of options, one per line: name, label, extra price per step in cents, and values."""
KINDS = {
    "beauty": """
skin care: care: scent, pack: face cream 8-45, body lotion 6-30, sun lotion 9-35, lip balm 3-12
hair care: care: scent, pack: shampoo 5-28, hair conditioner 5-28, hair oil 8-38, styling gel 4-18
make-up: care: color, pack: mascara 6-30, lipstick 5-28, eye shadow 7-36, nail polish 3-14
""",
    "clothing": """
tops: fabric: color, clothing size: t-shirt 9-40, hooded sweater 20-80, rain jacket 35-150, blouse 16-70
trousers: fabric: color, clothing size: jeans 25-110, leggings 12-55, hiking pants 30-120, pajama pants 12-45
shoes: shoe: color, shoe size: running shoes 40-160, work boots 50-190, sandals 18-80, slippers 10-45
""",
    "electronics": """
audio: device: color, cable: headphones 25-220, bluetooth speaker 20-180, clock radio 15-90, microphone 25-160
computing: device: color, storage: tablet 90-480, e-reader 70-280, digital photo frame 40-180, portable drive 40-210
accessories: device: color, cable: keyboard 18-150, computer mouse 10-90, desk lamp 15-95, security camera 30-190
""",
    "kitchen": """
cookware: kitchen: color, capacity: saucepan 18-90, frying pan 15-95, casserole 25-130, tea kettle 18-80
storage: kitchen: color, capacity: lunch box 8-40, water bottle 8-45, food container 6-35, thermos flask 14-60
tools: kitchen: color, extra: chef knife 15-120, cutting board 9-60, vegetable slicer 8-45, whisk 5-28
""",
    "furniture": """
living room: home: finish, width: bookcase 50-320, coffee table 45-300, tv stand 55-330, side table 25-150
office: home: finish, width: writing desk 70-420, filing cabinet 60-280, standing desk 120-600, shelf 20-120
textiles: textile: color, width: curtain 14-90, rug 25-240, bed cover 25-160, table runner 8-45
""",
    "outdoor": """
camping: camp: color, persons: tent 60-420, sleeping mat 25-140, hammock 25-120, beach shelter 22-95
water: camp: color, clothing size: life vest 30-150, swim goggles 8-50, wetsuit 60-300, dry bag 10-70
cycling: camp: color, clothing size: bicycle helmet 25-160, cycling gloves 10-60, cycling jersey 25-120, rain cape 18-90
""",
}
"""By department, one section per line: name, set of attributes, groups of options, and kinds with their price range in
dollars."""
BRANDS = tuple(
    first + second
    for first in ("Al", "Bren", "Cor", "Dal", "El", "Fjor", "Gal", "Hol", "Is", "Jor", "Kel", "Lum", "Mar", "Nor")
    for second in ("dara", "vik", "mont", "lund", "tessa", "ora")
)
SERIES = ("Classic", "Prime", "Trail", "Nova", "Pure", "Studio", "Urban", "Origin", "Flow", "Aster", "Delta", "Vero")
OPENINGS = (
    "Made by {brand} for people who use their {kind} every day.",
    "The {series} line has been with {brand} from the start.",
    "A {kind} that does what it should.",
    "{brand} makes this {kind} in small batches.",
    "Our customers asked for a better {kind}, and here it is.",
)
CLAIMS = (
    "It is {name}.",
    "What buyers like most: {name}.",
    "We are proud of this one: {name}.",
    "In short: {name}.",
)
LURES = (
    "For {name}, see our {series} {number}, sold separately.",
    "Unlike the {series} {number}, this one is not {name}.",
    "Also in our shop: the {series} {number} ({name}).",
    "Please note: not {name}.",
)
"""Sentences of a description that name an attribute that the product lacks."""
PADDING = (
    "Comes in a recycled box.",
    "Two years of warranty.",
    "Ships within two days.",
    "Designed in our own studio.",
    "A good present.",
    "Gift wrapping on request.",
)


class OptionGroup(NamedTuple):
    """Options of which a buyer chooses one."""

    label: str
    step: int
    """Extra price per step, in cents."""
    values: tuple[str, ...]


class Kind(NamedTuple):
    """Kind of product."""

    department: str
    section: str
    name: str
    attributes: str
    """Set of its attributes, a key of ATTRIBUTES."""
    options: tuple[str, ...]
    """Names of its groups of options."""
    low: int
    high: int
    """Price range in dollars."""


class Product(NamedTuple):
    """Product of the catalog."""

    number: int
    """Index in the catalog, from 0."""
    code: str
    department: str
    section: str
    kind: str
    brand: str
    series: str
    attributes: tuple[str, ...]
    """Canonical names of the attributes."""
    options: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    """Label and values of each group of options; each value with its extra price in cents."""
    cents: int
    """Price of the cheapest choice in cents."""
    synonyms: tuple[str, ...]
    """Synonym that the texts use for each attribute."""

    @property
    def title(self) -> str:
        shown = ", ".join(self.synonyms[: 1 + self.number % 2])
        return f"{self.brand} {self.series} {self.kind}, {shown}"

    def price(self, chosen: dict[str, str]) -> int:
        """Return the price in cents. chosen: option values by label; other groups count with their cheapest value."""
        extras = (extra for label, values in self.options for value, extra in values if chosen.get(label) == value)
        return self.cents + sum(extras)

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest price in cents."""
        return self.cents, self.cents + sum(max(extra for _, extra in values) for _, values in self.options)


@functools.cache
def option_groups() -> dict[str, OptionGroup]:
    """Return the groups of options by name."""
    rows = (line.split(": ") for line in OPTIONS.strip().splitlines())
    return {name: OptionGroup(label, int(step), tuple(values.split(", "))) for name, label, step, values in rows}


@functools.cache
def kinds() -> dict[str, Kind]:
    """Return the kinds of products by name."""
    by_name: dict[str, Kind] = {}
    rows = [(department, line) for department, lines in KINDS.items() for line in lines.strip().splitlines()]
    for department, line in rows:
        section, attributes, options, priced = line.split(": ")
        for entry in priced.split(", "):
            name, _, prices = entry.rpartition(" ")
            low, high = map(int, prices.split("-"))
            by_name[name] = Kind(department, section, name, attributes, tuple(options.split(", ")), low, high)
    return by_name


@functools.lru_cache(maxsize=4)  # a collector creates many instances of the same shop
def catalog(seed: int, products: int) -> tuple[Product, ...]:
    """Return all products, with random kinds."""
    rng = random.Random(f"webshop products {seed}")
    codes, all_kinds = rng.sample(range(10**6), products), list(kinds().values())
    generated = []
    for number in range(products):
        kind = rng.choice(all_kinds)
        attribute_names = rng.sample(ATTRIBUTES[kind.attributes], rng.randint(3, 6))
        generated.append(
            Product(
                number=number,
                code=f"P{codes[number]:06d}",
                department=kind.department,
                section=kind.section,
                kind=kind.name,
                brand=rng.choice(BRANDS),
                series=f"{rng.choice(SERIES)} {rng.randrange(10, 1000)}",
                attributes=tuple(names[0] for names in attribute_names),
                options=tuple(_group(rng, name) for name in kind.options),
                cents=rng.randrange(kind.low * 10, kind.high * 10) * 10 - 1,
                synonyms=tuple(rng.choice(names) for names in attribute_names),
            )
        )
    return tuple(generated)


def description(seed: int, product: Product) -> str:
    rng = random.Random(f"webshop description {seed} {product.number}")
    words = {"brand": product.brand, "series": product.series.split()[0], "kind": product.kind}
    absent = [names for names in ATTRIBUTES[kinds()[product.kind].attributes] if names[0] not in product.attributes]
    claims = [rng.choice(CLAIMS).format(name=name) for name in rng.sample(product.synonyms, 2)]
    lures = [
        rng.choice(LURES).format(name=rng.choice(names), series=rng.choice(SERIES), number=rng.randrange(10, 1000))
        for names in rng.sample(absent, 2)
    ]
    sentences = [*claims, *lures, rng.choice(PADDING)]
    rng.shuffle(sentences)
    return " ".join([rng.choice(OPENINGS).format(**words), *sentences])


def features(seed: int, product: Product) -> list[str]:
    rng = random.Random(f"webshop features {seed} {product.number}")
    texts = [*product.synonyms, *(words.rstrip(".") for words in rng.sample(PADDING, 2))]
    rng.shuffle(texts)
    return texts


def _group(rng: random.Random, name: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return a group of options for one product: a random subset of the values, in their order."""
    label, step, values = option_groups()[name]
    indices = sorted(rng.sample(range(len(values)), rng.randint(3, min(6, len(values)))))
    step = step * rng.randint(5, 15) // 100 * 10
    return label, tuple((values[index], (index - indices[0]) * step) for index in indices)


NAMES = {names[0]: names for group in ATTRIBUTES.values() for names in group}
"""All synonyms of an attribute, by its canonical name."""
