"""The databases and what is asked about them: four schemas, each with its tables, its data and its questions.

A question is text with places to fill, and a query with the same places; what fills them is drawn from the schema's
`values`, all of which occur in the data. Rows whose order is asked for are ordered without ties.

Dates are text, as `2024-03-05`. Sums of money are whole dollars.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

Rows = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Question:
    type: str
    """filter, aggregate, join, group, dates, nested or rank."""
    difficulty: int
    """1 one table and a condition; 2 an aggregate or one join; 3 groups, dates or two joins; 4 nested queries;
    5 ranks within groups, or several of these at once."""
    text: str
    sql: str
    ordered: bool = False
    """Whether the rows have to be in order."""


@dataclass(frozen=True)
class Schema:
    tables: str
    """The statements that create them."""
    rows: Callable[[random.Random], Rows]
    values: dict[str, Sequence[Any]]
    questions: tuple[Question, ...]


FIRST = (
    "Ana",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gia",
    "Hal",
    "Ida",
    "Jan",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
)
LAST = ("Abel", "Brook", "Cole", "Dorn", "Ek", "Frost", "Gray", "Holm", "Iyer", "Jones", "Kato", "Lund", "Moss", "Nash")
CITIES = ("Bergen", "Cairo", "Lima", "Lyon", "Osaka", "Quito")
YEARS = (2022, 2023, 2024)
MONTHS = tuple(f"{month:02d}" for month in range(1, 13))


def _names(rng: random.Random, count: int) -> list[str]:
    return rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)


def _cycle(rng: random.Random, values: Sequence[Any], count: int) -> list[Any]:
    """Each value about equally often, in any order."""
    drawn = [values[at % len(values)] for at in range(count)]
    rng.shuffle(drawn)
    return drawn


def _day(rng: random.Random, month: int) -> date:
    """A day of one of the 36 months."""
    return date(YEARS[month // 12], month % 12 + 1, rng.randrange(1, 29))


# A shop

CATEGORIES = ("books", "garden", "kitchen", "music", "toys")


def _shop(rng: random.Random) -> Rows:
    cities = _cycle(rng, CITIES, 36)
    customers = [
        (at, name, cities[at - 1], _day(rng, rng.randrange(12)).isoformat())
        for at, name in enumerate(_names(rng, 36), 1)
    ]
    categories = _cycle(rng, CATEGORIES, 25)
    words = [
        f"{one} {two}"
        for one in ("Blue", "Red", "Old", "Tiny", "Grand")
        for two in ("Box", "Set", "Kit", "Star", "Pack")
    ]
    products = [
        (at, word, categories[at - 1], rng.randrange(5, 200)) for at, word in enumerate(rng.sample(words, 25), 1)
    ]
    buyers = rng.sample(range(1, 37), 31)  # a few never order
    states = _cycle(rng, ("paid", "paid", "shipped", "shipped", "shipped", "cancelled"), 144)
    orders = [(at, rng.choice(buyers), _day(rng, (at - 1) % 36).isoformat(), states[at - 1]) for at in range(1, 145)]
    sold = rng.sample(range(1, 26), 22)
    items = [
        (order, product, rng.randrange(1, 9))
        for order in range(1, 145)
        for product in rng.sample(sold, rng.randrange(1, 5))
    ]
    return {"customers": customers, "products": products, "orders": orders, "items": items}


SHOP = Schema(
    tables="""
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), day TEXT,
    state TEXT);
CREATE TABLE items (order_id INTEGER REFERENCES orders(id), product_id INTEGER REFERENCES products(id),
    quantity INTEGER);
""",
    rows=_shop,
    values={
        "city": CITIES,
        "category": CATEGORIES,
        "state": ("paid", "shipped", "cancelled"),
        "year": YEARS,
        "month": MONTHS,
        "price": range(20, 90),
        "top": range(3, 8),
    },
    questions=(
        Question(
            "filter",
            1,
            "What are the names of the customers from {city}?",
            "SELECT name FROM customers WHERE city = '{city}'",
        ),
        Question(
            "filter",
            1,
            "List name and price of the products that cost more than {price} dollars.",
            "SELECT name, price FROM products WHERE price > {price}",
        ),
        Question(
            "filter",
            1,
            "List names and prices of the products of the category {category}, the dearest first, equal "
            "prices by name.",
            "SELECT name, price FROM products WHERE category = '{category}' ORDER BY price DESC, name",
            ordered=True,
        ),
        Question(
            "aggregate",
            2,
            "How many orders are in the state {state} and were made in {year}?",
            "SELECT COUNT(*) FROM orders WHERE state = '{state}' AND day LIKE '{year}-%'",
        ),
        Question(
            "join",
            2,
            "List the ids of all orders of customers from {city} that are {state}.",
            "SELECT o.id FROM orders o JOIN customers c ON c.id = o.customer_id WHERE c.city = '{city}' AND "
            "o.state = '{state}'",
        ),
        Question(
            "aggregate",
            2,
            "What is the average price of the products of the category {category}, rounded to two decimals?",
            "SELECT ROUND(AVG(price), 2) FROM products WHERE category = '{category}'",
        ),
        Question(
            "group",
            3,
            "For each category, how many pieces were sold in orders of {year}? Leave out cancelled orders, "
            "and categories that sold nothing.",
            "SELECT p.category, SUM(i.quantity) FROM items i JOIN products p ON p.id = i.product_id JOIN "
            "orders o ON o.id = i.order_id WHERE o.day LIKE '{year}-%' AND o.state <> 'cancelled' GROUP BY "
            "p.category",
        ),
        Question(
            "dates",
            3,
            "What is the turnover, price times quantity, of each month of {year}? Give the month as text of "
            "two digits, and the turnover; orders that are cancelled do not count.",
            "SELECT strftime('%m', o.day), SUM(i.quantity * p.price) FROM orders o JOIN items i ON i.order_id "
            "= o.id JOIN products p ON p.id = i.product_id WHERE o.day LIKE '{year}-%' AND o.state <> "
            "'cancelled' GROUP BY 1",
        ),
        Question(
            "dates",
            3,
            "List the ids of the orders from {city} that were made within 300 days after the customer joined, "
            "the day of the 300th day included.",
            "SELECT o.id FROM orders o JOIN customers c ON c.id = o.customer_id WHERE c.city = '{city}' AND "
            "julianday(o.day) - julianday(c.joined) BETWEEN 0 AND 300",
        ),
        Question(
            "nested",
            4,
            "Which customers have no order that is {state}? List their names.",
            "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders WHERE state = '{state}')",
        ),
        Question(
            "nested",
            4,
            "Which products cost more than the average product of their own category, and more than {price} "
            "dollars? List their names.",
            "SELECT name FROM products p WHERE price > {price} AND price > (SELECT AVG(price) FROM products q "
            "WHERE q.category = p.category)",
        ),
        Question(
            "rank",
            5,
            "Which {top} customers spent most in all orders that are not cancelled? Give name and sum (price "
            "times quantity), the highest sum first, equal sums by name.",
            "SELECT c.name, SUM(i.quantity * p.price) AS spent FROM customers c JOIN orders o ON "
            "o.customer_id = c.id JOIN items i ON i.order_id = o.id JOIN products p ON p.id = i.product_id "
            "WHERE o.state <> 'cancelled' GROUP BY c.id ORDER BY spent DESC, c.name LIMIT {top}",
            ordered=True,
        ),
        Question(
            "rank",
            5,
            "For each city, which customer made the most orders in {year}, of any state? Give city, name and "
            "number; of equal ones the first by name; leave out cities without orders in that year.",
            "SELECT city, name, n FROM (SELECT c.city, c.name, COUNT(*) AS n, ROW_NUMBER() OVER (PARTITION BY "
            "c.city ORDER BY COUNT(*) DESC, c.name) AS place FROM customers c JOIN orders o ON o.customer_id "
            "= c.id WHERE o.day LIKE '{year}-%' GROUP BY c.id) WHERE place = 1",
        ),
    ),
)


# A library

COUNTRIES = ("Chile", "Egypt", "France", "Japan")
GENRES = ("crime", "history", "poetry", "science", "travel")


def _library(rng: random.Random) -> Rows:
    people, countries = _names(rng, 46), _cycle(rng, COUNTRIES, 16)
    authors = [(at, name, countries[at - 1]) for at, name in enumerate(people[:16], 1)]
    members = [(at, name, rng.randrange(12, 80)) for at, name in enumerate(people[16:], 1)]
    titles = [
        f"The {one} {two}"
        for one in ("Silent", "Last", "Green", "Broken", "Lost", "Second")
        for two in ("River", "House", "Letter", "Winter", "Garden", "Road", "Clock")
    ]
    genres = _cycle(rng, GENRES, 42)
    books = [
        (at, title, rng.randrange(1, 17), genres[at - 1], rng.randrange(1950, 2022), rng.randrange(1, 5))
        for at, title in enumerate(rng.sample(titles, 42), 1)
    ]
    readers, lent = rng.sample(range(1, 31), 26), rng.sample(range(1, 43), 38)
    loans = []
    for at in range(1, 181):
        day = _day(rng, (at - 1) % 36)
        back = None if rng.random() < 0.12 else (day + timedelta(days=rng.randrange(1, 50))).isoformat()
        loans.append((at, rng.choice(lent), rng.choice(readers), day.isoformat(), back))
    return {"authors": authors, "members": members, "books": books, "loans": loans}


LIBRARY = Schema(
    tables="""
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);
CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER REFERENCES authors(id), genre TEXT,
    year INTEGER, copies INTEGER);
CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER REFERENCES books(id),
    member_id INTEGER REFERENCES members(id), taken TEXT, returned TEXT);  -- returned: null while it is out
""",
    rows=_library,
    values={
        "genre": GENRES,
        "country": COUNTRIES,
        "year": YEARS,
        "since": range(1965, 1995),
        "age": range(25, 60),
        "times": (2, 3, 4),
        "top": range(3, 8),
    },
    questions=(
        Question(
            "filter",
            1,
            "What are the titles of the {genre} books?",
            "SELECT title FROM books WHERE genre = '{genre}'",
        ),
        Question(
            "filter",
            1,
            "List the titles of the books that appeared in {since} or later, the oldest first, those of one "
            "year by title.",
            "SELECT title FROM books WHERE year >= {since} ORDER BY year, title",
            ordered=True,
        ),
        Question(
            "aggregate",
            2,
            "How many copies of {genre} books does the library own?",
            "SELECT SUM(copies) FROM books WHERE genre = '{genre}'",
        ),
        Question(
            "aggregate",
            2,
            "How many loans of {year} have not been returned?",
            "SELECT COUNT(*) FROM loans WHERE taken LIKE '{year}-%' AND returned IS NULL",
        ),
        Question(
            "join",
            2,
            "List title and author's name of the books by authors from {country}.",
            "SELECT b.title, a.name FROM books b JOIN authors a ON a.id = b.author_id WHERE a.country = '{country}'",
        ),
        Question(
            "join",
            3,
            "Which members older than {age} have ever borrowed a {genre} book? List each name once.",
            "SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id JOIN books b ON b.id = "
            "l.book_id WHERE m.age > {age} AND b.genre = '{genre}'",
        ),
        Question(
            "group",
            3,
            "For each genre, how many loans began in {year}? Leave out genres without any.",
            "SELECT b.genre, COUNT(*) FROM loans l JOIN books b ON b.id = l.book_id WHERE l.taken LIKE "
            "'{year}-%' GROUP BY b.genre",
        ),
        Question(
            "dates",
            3,
            "Of the loans of {genre} books that were returned, how many days did they take on average, "
            "rounded to two decimals?",
            "SELECT ROUND(AVG(julianday(l.returned) - julianday(l.taken)), 2) FROM loans l JOIN books b ON "
            "b.id = l.book_id WHERE b.genre = '{genre}' AND l.returned IS NOT NULL",
        ),
        Question(
            "dates",
            3,
            "Which members kept a book for more than 30 days, of the loans that began in {year} and were "
            "returned? List each name once.",
            "SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id WHERE l.taken LIKE "
            "'{year}-%' AND julianday(l.returned) - julianday(l.taken) > 30",
        ),
        Question(
            "nested",
            4,
            "Which books were not borrowed in {year}? List their titles.",
            "SELECT title FROM books WHERE id NOT IN (SELECT book_id FROM loans WHERE taken LIKE '{year}-%')",
        ),
        Question(
            "nested",
            4,
            "Which members borrowed at least {times} different {genre} books? List their names.",
            "SELECT name FROM members WHERE id IN (SELECT l.member_id FROM loans l JOIN books b ON b.id = "
            "l.book_id WHERE b.genre = '{genre}' GROUP BY l.member_id HAVING COUNT(DISTINCT b.id) >= {times})",
        ),
        Question(
            "rank",
            5,
            "Which {top} authors' books were borrowed most often? Give name and number of loans, the highest "
            "first, equal ones by name.",
            "SELECT a.name, COUNT(*) AS n FROM authors a JOIN books b ON b.author_id = a.id JOIN loans l ON "
            "l.book_id = b.id GROUP BY a.id ORDER BY n DESC, a.name LIMIT {top}",
            ordered=True,
        ),
        Question(
            "rank",
            5,
            "For each genre, which book was borrowed most often in {year}? Give genre, title and number; of "
            "equal ones the first by title; leave out genres without loans in that year.",
            "SELECT genre, title, n FROM (SELECT b.genre, b.title, COUNT(*) AS n, ROW_NUMBER() OVER "
            "(PARTITION BY b.genre ORDER BY COUNT(*) DESC, b.title) AS place FROM books b JOIN loans l ON "
            "l.book_id = b.id WHERE l.taken LIKE '{year}-%' GROUP BY b.id) WHERE place = 1",
        ),
    ),
)


# Flights

AIRLINES = ("Aurora", "Borealis", "Condor Sky", "Delta Wind")
AIRPORTS = tuple(zip(("BGO", "CAI", "LIM", "LYS", "ITM", "UIO"), CITIES, strict=True))


def _flights(rng: random.Random) -> Rows:
    airports = [(code, city) for code, city in AIRPORTS]
    airlines = [(at, name) for at, name in enumerate(AIRLINES, 1)]
    pairs = _cycle(rng, [(one, two) for one, _ in AIRPORTS for two, _ in AIRPORTS if one != two], 180)
    flights = []
    for at, (origin, target) in enumerate(pairs, 1):
        delay = rng.choice((0, 0, 0, rng.randrange(1, 30), rng.randrange(30, 240)))
        day = _day(rng, (at - 1) % 36).isoformat()
        flights.append((at, rng.randrange(1, 5), origin, target, day, rng.randrange(60, 900), delay))
    bookings = [
        (at, rng.randrange(1, 171), name, rng.randrange(40, 900))
        for at, name in enumerate(rng.choices(_names(rng, 40), k=320), 1)
    ]
    return {"airports": airports, "airlines": airlines, "flights": flights, "bookings": bookings}


FLIGHTS = Schema(
    tables="""
CREATE TABLE airports (code TEXT PRIMARY KEY, city TEXT);
CREATE TABLE airlines (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE flights (id INTEGER PRIMARY KEY, airline_id INTEGER REFERENCES airlines(id),
    origin TEXT REFERENCES airports(code), target TEXT REFERENCES airports(code), day TEXT, minutes INTEGER,
    delay INTEGER);  -- minutes: in the air; delay: in minutes, 0 where it was on time
CREATE TABLE bookings (id INTEGER PRIMARY KEY, flight_id INTEGER REFERENCES flights(id), passenger TEXT, price INTEGER);
""",
    rows=_flights,
    values={
        "city": CITIES,
        "airline": AIRLINES,
        "year": YEARS,
        "delay": range(20, 90),
        "minutes": range(200, 600),
        "top": range(3, 8),
        "price": range(300, 700),
    },
    questions=(
        Question(
            "filter",
            1,
            "List the ids of the flights of {year} that were more than {delay} minutes late.",
            "SELECT id FROM flights WHERE delay > {delay} AND day LIKE '{year}-%'",
        ),
        Question(
            "filter",
            1,
            "List id and price of the bookings that cost at least {price} dollars, the dearest first, equal "
            "prices by id.",
            "SELECT id, price FROM bookings WHERE price >= {price} ORDER BY price DESC, id",
            ordered=True,
        ),
        Question(
            "aggregate",
            2,
            "How many flights of {year} are longer than {minutes} minutes?",
            "SELECT COUNT(*) FROM flights WHERE minutes > {minutes} AND day LIKE '{year}-%'",
        ),
        Question(
            "join",
            2,
            "List the ids of the flights of {airline} that were more than {delay} minutes late.",
            "SELECT f.id FROM flights f JOIN airlines a ON a.id = f.airline_id WHERE a.name = '{airline}' AND "
            "f.delay > {delay}",
        ),
        Question(
            "join",
            2,
            "List id and day of the flights that start in {city} in {year}.",
            "SELECT f.id, f.day FROM flights f JOIN airports p ON p.code = f.origin WHERE p.city = '{city}' "
            "AND f.day LIKE '{year}-%'",
        ),
        Question(
            "join",
            3,
            "Which passengers have booked a flight of {airline} to {city}? List each name once.",
            "SELECT DISTINCT b.passenger FROM bookings b JOIN flights f ON f.id = b.flight_id JOIN airlines a "
            "ON a.id = f.airline_id JOIN airports p ON p.code = f.target WHERE a.name = '{airline}' AND "
            "p.city = '{city}'",
        ),
        Question(
            "group",
            3,
            "For each airline, what is the average delay of its flights of {year}, rounded to two decimals? "
            "Give name and average.",
            "SELECT a.name, ROUND(AVG(f.delay), 2) FROM airlines a JOIN flights f ON f.airline_id = a.id "
            "WHERE f.day LIKE '{year}-%' GROUP BY a.id",
        ),
        Question(
            "dates",
            3,
            "On which days of the week do flights to {city} leave, and how many? Give the day as strftime's "
            "%w says it (text, 0 is Sunday) and the number; leave out days without any.",
            "SELECT strftime('%w', f.day), COUNT(*) FROM flights f JOIN airports p ON p.code = f.target WHERE "
            "p.city = '{city}' GROUP BY 1",
        ),
        Question(
            "nested",
            4,
            "Which flights of {airline} has nobody booked? List their ids.",
            "SELECT f.id FROM flights f JOIN airlines a ON a.id = f.airline_id WHERE a.name = '{airline}' AND "
            "f.id NOT IN (SELECT flight_id FROM bookings)",
        ),
        Question(
            "nested",
            4,
            "Which flights from {city} take longer than the average flight of their airline? List their ids.",
            "SELECT f.id FROM flights f JOIN airports p ON p.code = f.origin WHERE p.city = '{city}' AND "
            "f.minutes > (SELECT AVG(g.minutes) FROM flights g WHERE g.airline_id = f.airline_id)",
        ),
        Question(
            "rank",
            5,
            "Which {top} passengers paid most for flights of {year}? Give name and sum, the highest first, "
            "equal sums by name.",
            "SELECT b.passenger, SUM(b.price) AS paid FROM bookings b JOIN flights f ON f.id = b.flight_id "
            "WHERE f.day LIKE '{year}-%' GROUP BY b.passenger ORDER BY paid DESC, b.passenger LIMIT {top}",
            ordered=True,
        ),
        Question(
            "rank",
            5,
            "For each city from which flights start, which airline earned most by bookings of these flights? "
            "Only flights of {year} count. Give city, airline and sum; of equal ones the first by name.",
            "SELECT city, name, paid FROM (SELECT p.city, a.name, SUM(b.price) AS paid, ROW_NUMBER() OVER "
            "(PARTITION BY p.code ORDER BY SUM(b.price) DESC, a.name) AS place FROM flights f JOIN airports p "
            "ON p.code = f.origin JOIN airlines a ON a.id = f.airline_id JOIN bookings b ON b.flight_id = "
            "f.id WHERE f.day LIKE '{year}-%' GROUP BY p.code, a.id) WHERE place = 1",
        ),
    ),
)


# A school

SUBJECTS = ("art", "biology", "chemistry", "latin", "maths")


def _school(rng: random.Random) -> Rows:
    people = _names(rng, 58)
    teachers = [(at, name) for at, name in enumerate(people[:10], 1)]
    classes = _cycle(rng, ("7a", "7b", "8a", "8b"), 48)
    students = [
        (at, name, classes[at - 1], _day(rng, rng.randrange(12)).replace(year=2010).isoformat())
        for at, name in enumerate(people[10:], 1)
    ]
    subjects = _cycle(rng, SUBJECTS, 15)
    courses = [(at, subject, rng.randrange(1, 10), rng.randrange(1, 6)) for at, subject in enumerate(subjects, 1)]
    taken = [(student, course) for student in range(1, 49) for course in rng.sample(range(1, 15), rng.randrange(2, 6))]
    exams = [
        (at, student, course, _day(rng, rng.randrange(36)).isoformat(), rng.randrange(20, 101))
        for at, (student, course) in enumerate([one for one in taken for _ in range(rng.randrange(0, 4))], 1)
    ]
    return {"teachers": teachers, "students": students, "courses": courses, "enrolled": taken, "exams": exams}


SCHOOL = Schema(
    tables="""
CREATE TABLE teachers (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE students (id INTEGER PRIMARY KEY, name TEXT, class TEXT, born TEXT);
CREATE TABLE courses (id INTEGER PRIMARY KEY, subject TEXT, teacher_id INTEGER REFERENCES teachers(id), hours INTEGER);
CREATE TABLE enrolled (student_id INTEGER REFERENCES students(id), course_id INTEGER REFERENCES courses(id));
CREATE TABLE exams (id INTEGER PRIMARY KEY, student_id INTEGER REFERENCES students(id),
    course_id INTEGER REFERENCES courses(id), day TEXT, points INTEGER);  -- points: 0 to 100, 50 is a pass
""",
    rows=_school,
    values={
        "class": ("7a", "7b", "8a", "8b"),
        "subject": SUBJECTS,
        "year": YEARS,
        "points": range(75, 92),
        "hours": (5, 6, 7, 8),
        "top": range(3, 8),
        "month": tuple(range(1, 13)),
    },
    questions=(
        Question(
            "filter",
            1,
            "What are the names of the students of class {class}?",
            "SELECT name FROM students WHERE class = '{class}'",
        ),
        Question(
            "filter",
            1,
            "List id and points of the exams of {year} with at least {points} points, the best first, equal "
            "ones by id.",
            "SELECT id, points FROM exams WHERE points >= {points} AND day LIKE '{year}-%' ORDER BY points DESC, id",
            ordered=True,
        ),
        Question(
            "aggregate",
            2,
            "How many exams of {year} had at least {points} points?",
            "SELECT COUNT(*) FROM exams WHERE points >= {points} AND day LIKE '{year}-%'",
        ),
        Question(
            "join",
            2,
            "Which teachers teach {subject}? List each name once.",
            "SELECT DISTINCT t.name FROM teachers t JOIN courses c ON c.teacher_id = t.id WHERE c.subject = "
            "'{subject}'",
        ),
        Question(
            "join",
            3,
            "Which students of class {class} are enrolled in a course of {subject}? List each name once.",
            "SELECT DISTINCT s.name FROM students s JOIN enrolled e ON e.student_id = s.id JOIN courses c ON "
            "c.id = e.course_id WHERE s.class = '{class}' AND c.subject = '{subject}'",
        ),
        Question(
            "group",
            3,
            "For each class, what is the average of the points in exams of {subject}, rounded to two "
            "decimals? Leave out classes without such exams.",
            "SELECT s.class, ROUND(AVG(x.points), 2) FROM exams x JOIN students s ON s.id = x.student_id JOIN "
            "courses c ON c.id = x.course_id WHERE c.subject = '{subject}' GROUP BY s.class",
        ),
        Question(
            "group",
            3,
            "In which subjects do the courses together have at least {hours} hours? Give subject and hours.",
            "SELECT subject, SUM(hours) FROM courses GROUP BY subject HAVING SUM(hours) >= {hours}",
        ),
        Question(
            "dates",
            3,
            "How many exams were there in each month of {year}? Give the month as text of two digits and the "
            "number; leave out months without any.",
            "SELECT strftime('%m', day), COUNT(*) FROM exams WHERE day LIKE '{year}-%' GROUP BY 1",
        ),
        Question(
            "nested",
            4,
            "Which students of class {class} have not passed any exam of {subject}? Those who took none "
            "count, too. List their names.",
            "SELECT name FROM students WHERE class = '{class}' AND id NOT IN (SELECT x.student_id FROM exams "
            "x JOIN courses c ON c.id = x.course_id WHERE c.subject = '{subject}' AND x.points >= 50)",
        ),
        Question(
            "nested",
            4,
            "Which exams of {year} in {subject} had more points than the average exam of the same course, "
            "over all years? List their ids.",
            "SELECT x.id FROM exams x JOIN courses c ON c.id = x.course_id WHERE c.subject = '{subject}' AND "
            "x.day LIKE '{year}-%' AND x.points > (SELECT AVG(y.points) FROM exams y WHERE y.course_id = "
            "x.course_id)",
        ),
        Question(
            "rank",
            5,
            "Which {top} students have the best average of points in exams of {year}, the average rounded to "
            "two decimals? Give name and average, the best first, equal ones by name.",
            "SELECT s.name, ROUND(AVG(x.points), 2) AS mean FROM students s JOIN exams x ON x.student_id = "
            "s.id WHERE x.day LIKE '{year}-%' GROUP BY s.id ORDER BY mean DESC, s.name LIMIT {top}",
            ordered=True,
        ),
        Question(
            "rank",
            5,
            "For each class, who had the most points in one exam of {year}? Give class, name and points; of "
            "equal ones the first by name; leave out classes without exams in that year.",
            "SELECT class, name, points FROM (SELECT s.class, s.name, x.points, ROW_NUMBER() OVER (PARTITION "
            "BY s.class ORDER BY x.points DESC, s.name) AS place FROM students s JOIN exams x ON x.student_id "
            "= s.id WHERE x.day LIKE '{year}-%') WHERE place = 1",
        ),
    ),
)

SCHEMAS = {"shop": SHOP, "library": LIBRARY, "flights": FLIGHTS, "school": SCHOOL}
