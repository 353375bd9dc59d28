"""Schema of a library: authors, members, books and loans."""

from __future__ import annotations

import random
from datetime import timedelta

from components.environments.worlds.sql.schemas.base import (
    YEARS,
    Rows,
    Schema,
    a_day,
    evenly,
    read_questions,
    some_names,
)

COUNTRIES = ("Chile", "Egypt", "France", "Japan")
GENRES = ("crime", "history", "poetry", "science", "travel")


def _rows(rng: random.Random) -> Rows:
    people, countries = some_names(rng, 46), evenly(rng, COUNTRIES, 16)
    authors = [(index, name, countries[index - 1]) for index, name in enumerate(people[:16], 1)]
    members = [(index, name, rng.randrange(12, 80)) for index, name in enumerate(people[16:], 1)]
    titles = [
        f"The {adjective} {noun}"
        for adjective in ("Silent", "Last", "Green", "Broken", "Lost", "Second")
        for noun in ("River", "House", "Letter", "Winter", "Garden", "Road", "Clock")
    ]
    genres = evenly(rng, GENRES, 42)
    books = [
        (index, title, rng.randrange(1, 17), genres[index - 1], rng.randrange(1950, 2022), rng.randrange(1, 5))
        for index, title in enumerate(rng.sample(titles, 42), 1)
    ]
    readers, lent = rng.sample(range(1, 31), 26), rng.sample(range(1, 43), 38)
    loans = []
    for index in range(1, 181):
        day = a_day(rng, (index - 1) % 36)
        back = None if rng.random() < 0.12 else (day + timedelta(days=rng.randrange(1, 50))).isoformat()
        loans.append((index, rng.choice(lent), rng.choice(readers), day.isoformat(), back))
    return {"authors": authors, "members": members, "books": books, "loans": loans}


SCHEMA = Schema(
    tables="""
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);
CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER REFERENCES authors(id), genre TEXT,
    year INTEGER, copies INTEGER);
CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER REFERENCES books(id),
    member_id INTEGER REFERENCES members(id), taken TEXT, returned TEXT);  -- returned: null while it is out
""",
    rows=_rows,
    values={
        "genre": GENRES,
        "country": COUNTRIES,
        "year": YEARS,
        "since": range(1965, 1995),
        "age": range(25, 60),
        "times": (2, 3, 4),
        "top": range(3, 8),
    },
    questions=read_questions("""
filter 1: What are the titles of the {genre} books?
SELECT title FROM books WHERE genre = '{genre}'

filter 1 ordered: List the titles of the books that appeared in {since} or later, the oldest first, those of one year
by title.
SELECT title FROM books WHERE year >= {since} ORDER BY year, title

aggregate 2: How many copies of {genre} books does the library own?
SELECT SUM(copies) FROM books WHERE genre = '{genre}'

aggregate 2: How many loans of {year} have not been returned?
SELECT COUNT(*) FROM loans WHERE taken LIKE '{year}-%' AND returned IS NULL

join 2: List title and author's name of the books by authors from {country}.
SELECT b.title, a.name FROM books b JOIN authors a ON a.id = b.author_id WHERE a.country = '{country}'

join 3: Which members older than {age} have ever borrowed a {genre} book? List each name once.
SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id JOIN books b ON b.id = l.book_id WHERE m.age
> {age} AND b.genre = '{genre}'

group 3: For each genre, how many loans began in {year}? Leave out genres without any.
SELECT b.genre, COUNT(*) FROM loans l JOIN books b ON b.id = l.book_id WHERE l.taken LIKE '{year}-%' GROUP BY b.genre

dates 3: Of the loans of {genre} books that were returned, how many days did they take on average, rounded to two
decimals?
SELECT ROUND(AVG(julianday(l.returned) - julianday(l.taken)), 2) FROM loans l JOIN books b ON b.id = l.book_id WHERE
b.genre = '{genre}' AND l.returned IS NOT NULL

dates 3: Which members kept a book for more than 30 days, of the loans that began in {year} and were returned? List
each name once.
SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id WHERE l.taken LIKE '{year}-%' AND
julianday(l.returned) - julianday(l.taken) > 30

nested 4: Which books were not borrowed in {year}? List their titles.
SELECT title FROM books WHERE id NOT IN (SELECT book_id FROM loans WHERE taken LIKE '{year}-%')

nested 4: Which members borrowed at least {times} different {genre} books? List their names.
SELECT name FROM members WHERE id IN (SELECT l.member_id FROM loans l JOIN books b ON b.id = l.book_id WHERE b.genre =
'{genre}' GROUP BY l.member_id HAVING COUNT(DISTINCT b.id) >= {times})

rank 5 ordered: Which {top} authors' books were borrowed most often? Give name and number of loans, the highest first,
equal ones by name.
SELECT a.name, COUNT(*) AS n FROM authors a JOIN books b ON b.author_id = a.id JOIN loans l ON l.book_id = b.id GROUP
BY a.id ORDER BY n DESC, a.name LIMIT {top}

rank 5: For each genre, which book was borrowed most often in {year}? Give genre, title and number; of equal ones the
first by title; leave out genres without loans in that year.
SELECT genre, title, n FROM (SELECT b.genre, b.title, COUNT(*) AS n, ROW_NUMBER() OVER (PARTITION BY b.genre ORDER BY
COUNT(*) DESC, b.title) AS place FROM books b JOIN loans l ON l.book_id = b.id WHERE l.taken LIKE '{year}-%' GROUP BY
b.id) WHERE place = 1
"""),
)
