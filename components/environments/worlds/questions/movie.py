"""Questions over films, people and ratings that need several linked look-ups."""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

from components.environments.tools import InvalidAction, to_json, tool
from components.environments.worlds.questions.base import Look, QuestionAndAnswer, Questions, require, require_unique
from components.specs.registered import registered

FIRST = ("Vera", "Milo", "Tessa", "Ivo", "Nora", "Emil", "Lotte", "Karim", "Runa", "Stefan", "Yara", "Otto", "Wanda")
LAST = ("Almqvist", "Berger", "Cano", "Dorsey", "Egede", "Farkas", "Gallo", "Hedin", "Ito", "Juarez", "Kovac", "Lund")
WHAT = ("Lantern", "Orchard", "Signal", "Harvest", "Mirror", "Harbour", "Winter", "Garden", "Compass", "Thunder")
WHERE = ("of Lisbon", "at Dawn", "Without End", "in the North", "for Two", "of Glass", "Underground", "at Sea")
GENRES = ("drama", "comedy", "thriller", "western", "musical")
COUNTRIES = ("Norway", "Chile", "Japan", "Kenya", "Italy", "Canada")


@registered("environment.movie")
class Movie(Questions):
    __doc__ = Questions.__doc__

    about = "Films and people have ids, such as f12 and p3; ratings go from 1 to 100."

    @classmethod
    def world(cls, draw: random.Random) -> dict[str, Any]:
        names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], 18)
        people = {
            f"p{key}": {"name": name, "born": draw.randrange(1930, 2006), "country": draw.choice(COUNTRIES)}
            for key, name in zip(draw.sample(range(1, 100), len(names)), names, strict=True)
        }
        titles = draw.sample([f"{subject} {where}" for subject in WHAT for where in WHERE], 26)
        films = {}
        for key, title in zip(draw.sample(range(1, 100), len(titles)), titles, strict=True):
            cast = draw.sample(sorted(people), draw.randrange(2, 6))
            films[f"f{key}"] = {
                "title": title,
                "year": draw.randrange(2012, 2028),
                "minutes": draw.randrange(71, 190),
                "genre": draw.choice(GENRES),
                "director": draw.choice(sorted(people)),
                "cast": cast,
                "critics": draw.randrange(1, 101),
                "viewers": draw.randrange(1, 101),
            }
        return {"people": people, "films": films}

    @tool
    def find_film(self, title: str) -> str:
        """The film with a title."""
        return to_json(film=self._named("films", "title", title))

    @tool
    def view_film(self, film: Annotated[str, "such as f12"]) -> str:
        """Title, year, minutes, genre, director and cast of a film."""
        film_data = self._of("films", film)
        return to_json(**{name: film_data[name] for name in ("title", "year", "minutes", "genre", "director", "cast")})

    @tool
    def ratings(self, film: str) -> str:
        """What critics and viewers give a film."""
        film_data = self._of("films", film)
        return to_json(critics=film_data["critics"], viewers=film_data["viewers"])

    @tool
    def find_person(self, name: Annotated[str, "first and last"]) -> str:
        """The person with a name."""
        return to_json(person=self._named("people", "name", name))

    @tool
    def view_person(self, person: Annotated[str, "such as p3"]) -> str:
        """Name, year of birth and country of a person."""
        return to_json(**self._of("people", person))

    @tool
    def films_of(self, person: str, role: Literal["director", "cast"]) -> str:
        """The films that a person directed, or is in the cast of."""
        self._of("people", person)
        films = [key for key, film in self.data["films"].items() if person in film[role]]
        return to_json(films=films)

    @tool
    def films_in(self, year: int) -> str:
        """The films of a year."""
        return to_json(films=[key for key, film in self.data["films"].items() if film["year"] == year])

    def _of(self, table: str, key: str) -> dict[str, Any]:
        if key not in self.data[table]:
            raise InvalidAction(f"nothing has the id {key[:40]}")
        return self.data[table][key]

    def _named(self, table: str, field: str, name: str) -> str:
        for key, entry in self.data[table].items():
            if entry[field].lower() == name.strip().lower():
                return str(key)
        raise InvalidAction(f"nothing is called {name[:60]}")

    # Questions

    def ask_detail(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title = self._film(draw)
        field, words = draw.choice(
            (("year", "In which year did {} come out?"), ("minutes", "How many minutes does {} take?"))
        )
        return words.format(title), look("view_film", film=look("find_film", title=title)["film"])[field]

    def ask_rating(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title = self._film(draw)
        ratings = look("ratings", film=look("find_film", title=title)["film"])
        who = draw.choice(("critics", "viewers"))
        return f"Which rating does {title} have from {who}?", ratings[who]

    def ask_director(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title = self._film(draw)
        film = look("view_film", film=look("find_film", title=title)["film"])
        person = look("view_person", person=film["director"])
        field, words = draw.choice(
            (
                ("name", "Who directed {}?"),
                ("country", "From which country is the director of {}?"),
                ("born", "In which year was the director of {} born?"),
            )
        )
        return words.format(title), person[field]

    def ask_extreme(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the longest, shortest, newest or oldest film of a person."""
        name = self._person(draw)
        role = draw.choice(("director", "cast"))
        films = look("films_of", person=look("find_person", name=name)["person"], role=role)["films"]
        require(2 <= len(films) <= 7)
        candidates = [look("view_film", film=film) for film in films]
        field, sign, word = draw.choice(
            (("minutes", 1, "longest"), ("minutes", -1, "shortest"), ("year", 1, "newest"), ("year", -1, "oldest"))
        )
        candidates.sort(key=lambda film_data: -sign * film_data[field])
        require_unique([film_data[field] for film_data in candidates])
        which = "that {} directed" if role == "director" else "that {} plays in"
        return f"What is the title of the {word} film {which.format(name)}?", candidates[0]["title"]

    def ask_best(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the film of a year with the best rating by critics or viewers."""
        year, who = draw.randrange(2012, 2028), draw.choice(("critics", "viewers"))
        films = look("films_in", year=year)["films"]
        title = self._best_rated(look, films, who)["title"]
        return f"Which film of {year} do {who} rate best? Its title, please.", title

    def ask_together(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the films that two people both play in."""
        first, second = self._person(draw), self._person(draw)
        require(first != second)
        films = [
            look("films_of", person=look("find_person", name=name)["person"], role="cast")["films"]
            for name in (first, second)
        ]
        both = [film for film in films[0] if film in films[1]]
        require(bool(both))
        titles = [look("view_film", film=film)["title"] for film in both]
        return f"In which films do both {first} and {second} play? Their titles, please.", titles

    def ask_oldest(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the oldest or youngest person of a film's cast."""
        title = self._film(draw)
        cast = look("view_film", film=look("find_film", title=title)["film"])["cast"]
        sign, word = draw.choice(((1, "oldest"), (-1, "youngest")))
        people = sorted(
            (look("view_person", person=person) for person in cast), key=lambda person_data: sign * person_data["born"]
        )
        require_unique([person_data["born"] for person_data in people])
        return f"Who is the {word} person in the cast of {title}?", people[0]["name"]

    def ask_chain(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the director of the best-rated film that a person plays in."""
        name, who = self._person(draw), draw.choice(("critics", "viewers"))
        films = look("films_of", person=look("find_person", name=name)["person"], role="cast")["films"]
        answer = look("view_person", person=self._best_rated(look, films, who)["director"])["name"]
        return f"Of the films that {name} plays in, who directed the one that {who} rate best?", answer

    def _best_rated(self, look: Look, films: list[str], who: str) -> dict[str, Any]:
        """Return the film that critics or viewers rate best."""
        require(2 <= len(films) <= 6)
        rated = sorted(((look("ratings", film=film)[who], film) for film in films), reverse=True)
        require_unique([rating for rating, _ in rated])
        best: dict[str, Any] = look("view_film", film=rated[0][1])
        return best

    def _film(self, draw: random.Random) -> str:
        return str(self.data["films"][draw.choice(sorted(self.data["films"]))]["title"])

    def _person(self, draw: random.Random) -> str:
        return str(self.data["people"][draw.choice(sorted(self.data["people"]))]["name"])
