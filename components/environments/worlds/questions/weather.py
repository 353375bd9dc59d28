"""Questions over past and forecast weather of places."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Annotated, Any

from components.environments.tools import InvalidAction, to_json, tool
from components.environments.worlds.questions.base import Look, QuestionAndAnswer, Questions, require, require_unique
from components.specs.registered import registered

TODAY = date(2031, 3, 15)
PAST, COMING = 30, 7
"""Number of days of history and of forecast; neither includes today."""
NAMES = ("Ashby", "Brackwater", "Colm", "Drey", "Elsfield", "Fenmoor", "Garrow", "Hythe", "Ivel", "Kestrel Bay")
REGIONS = ("Highland", "Lakes", "Coast")


@registered("environment.weather")
class Weather(Questions):
    __doc__ = Questions.__doc__

    about = (
        f"Today is {TODAY}, a Saturday. History goes {PAST} days back, the forecast {COMING} days on. Temperatures are "
        "in degrees Celsius, rain in millimetres, wind in km/h. Places have ids, such as x12; some share a name."
    )

    @classmethod
    def world(cls, draw: random.Random) -> dict[str, Any]:
        places = [(name, draw.choice(REGIONS)) for name in draw.sample(NAMES, 9)]
        places += [
            (name, draw.choice([other_region for other_region in REGIONS if other_region != region]))
            for name, region in places[:3]
        ]
        places_by_id = {}
        for key, (name, region) in zip(draw.sample(range(10, 100), len(places)), places, strict=True):
            base, wet = draw.randrange(-2, 19), draw.uniform(0.2, 0.8)
            days = {}
            for offset in [*range(-PAST, 0), *range(1, COMING + 1)]:
                low = base + draw.randrange(-5, 6)
                days[str(TODAY + timedelta(offset))] = {
                    "high": low + draw.randrange(2, 12),
                    "low": low,
                    "rain": draw.randrange(1, 25) if draw.random() < wet else 0,
                    "wind": draw.randrange(2, 80),
                }
            places_by_id[f"x{key}"] = {"name": name, "region": region, "height": draw.randrange(1, 1500), "days": days}
        return {"places": places_by_id}

    @tool
    def find_places(self, name: str) -> str:
        """The places with a name, and their regions."""
        matches = {
            key: place["region"]
            for key, place in self.data["places"].items()
            if place["name"].lower() == name.strip().lower()
        }
        if not matches:
            raise InvalidAction(f"no place is called {name[:60]}")
        return to_json(places=matches)

    @tool
    def view_place(self, place: Annotated[str, "such as x12"]) -> str:
        """Name, region and height in metres of a place."""
        place_data = self._place(place)
        return to_json(name=place_data["name"], region=place_data["region"], height=place_data["height"])

    @tool
    def places_in(self, region: str) -> str:
        """The places of a region."""
        keys = [key for key, place in self.data["places"].items() if place["region"].lower() == region.strip().lower()]
        return to_json(places=keys)

    @tool
    def history(self, place: str, date: Annotated[str, "a past day, such as 2031-03-02"]) -> str:
        """High, low, rain and wind of a day that is over."""
        return self._day(place, date, past=True)

    @tool
    def forecast(self, place: str, date: Annotated[str, "a coming day"]) -> str:
        """High, low, rain and wind that are expected."""
        return self._day(place, date, past=False)

    def _place(self, place: str) -> dict[str, Any]:
        if place not in self.data["places"]:
            raise InvalidAction(f"no place {place[:40]}")
        return self.data["places"][place]

    def _day(self, place: str, day: str, *, past: bool) -> str:
        days = self._place(place)["days"]
        if day not in days or (day < str(TODAY)) != past:
            other = "forecast" if past else "history"
            raise InvalidAction(
                f"nothing for {day[:40]}; dates as 2031-03-02, and {other} has the days on the other side"
            )
        return to_json(**days[day])

    # Questions

    def ask_value(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        named, place = self._which(look, draw)
        offset = draw.choice([*range(-6, 0), *range(1, COMING + 1)])
        field, word = draw.choice((("high", "high"), ("low", "low"), ("wind", "wind"), ("rain", "amount of rain")))
        verb = "was" if offset < 0 else "will be"
        return f"What {verb} the {word} in {named} {_when(offset)}?", self._at(look, place, offset)[field]

    def ask_change(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        named, place = self._which(look, draw)
        before, after = -draw.randrange(1, 7), draw.randrange(1, COMING + 1)
        rise = self._at(look, place, after)["high"] - self._at(look, place, before)["high"]
        question = f"By how many degrees is the high in {named} {_when(after)} above that {_when(before)}? "
        return question + "A negative number if it is below.", rise

    def ask_difference(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        first, place = self._which(look, draw)
        second, second_place = self._which(look, draw)
        require(place != second_place)
        offset = draw.choice([*range(-6, 0), *range(1, COMING + 1)])
        highs = [self._at(look, key, offset)["high"] for key in (place, second_place)]
        question = f"By how many degrees do the highs of {first} and {second} differ {_when(offset)}?"
        return question, abs(highs[0] - highs[1])

    def ask_rain(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the amount of rain, or the number of dry days, over some days."""
        named, place = self._which(look, draw)
        days = draw.randrange(3, 8)
        rainfall = [self._at(look, place, -offset)["rain"] for offset in range(days, 0, -1)]
        if draw.random() < 0.5:
            return f"How many millimetres of rain fell in {named} in the {days} days before today?", sum(rainfall)
        dry = sum(not rain for rain in rainfall)
        return f"On how many of the {days} days before today did no rain fall in {named}?", dry

    def ask_warmest(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the warmest or windiest of the coming days."""
        named, place = self._which(look, draw)
        days = draw.randrange(2, COMING + 1)
        field, word = draw.choice((("high", "highest high"), ("wind", "strongest wind")))
        ranked = [(self._at(look, place, offset)[field], offset) for offset in range(1, days + 1)]
        ranked.sort(reverse=True)
        require_unique([value for value, _ in ranked])
        day = str(TODAY + timedelta(ranked[0][1]))
        return f"Which of the next {days} days, from tomorrow on, has the {word} in {named}? Its date, please.", day

    def ask_place(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the place of a region with the most rain, the lowest low or the highest high."""
        region = draw.choice(REGIONS)
        offset = draw.choice([*range(-6, 0), *range(1, COMING + 1)])
        places = look("places_in", region=region)["places"]
        require(2 <= len(places) <= 6)
        field, sign, word = draw.choice(
            (("rain", 1, "most rain"), ("low", -1, "lowest low"), ("high", 1, "highest high"))
        )
        ranked = sorted(((sign * self._at(look, place, offset)[field], place) for place in places), reverse=True)
        require_unique([value for value, _ in ranked])
        name = look("view_place", place=ranked[0][1])["name"]
        return f"Which place of the {region} region has the {word} {_when(offset)}?", name

    def _which(self, look: Look, draw: random.Random) -> tuple[str, str]:
        """Return the name of a random place (with its region if the name is ambiguous) and its id."""
        key = draw.choice(sorted(self.data["places"]))
        name, region = (self.data["places"][key][field] for field in ("name", "region"))
        matches = look("find_places", name=name)["places"]
        return (f"{name} in the {region} region" if len(matches) > 1 else name), key

    def _at(self, look: Look, place: str, offset: int) -> dict[str, Any]:
        return look("history" if offset < 0 else "forecast", place=place, date=str(TODAY + timedelta(offset)))


def _when(offset: int) -> str:
    if offset in (-1, 1):
        return "yesterday" if offset < 0 else "tomorrow"
    return f"{-offset} days ago" if offset < 0 else f"in {offset} days"
