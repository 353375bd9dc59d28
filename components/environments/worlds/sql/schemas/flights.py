"""Schema of airlines, airports, flights and bookings."""

from __future__ import annotations

import random

from components.environments.worlds.sql.schemas.base import (
    CITIES,
    YEARS,
    Rows,
    Schema,
    a_day,
    evenly,
    read_questions,
    some_names,
)

AIRLINES = ("Aurora", "Borealis", "Condor Sky", "Delta Wind")
AIRPORTS = tuple(zip(("BGO", "CAI", "LIM", "LYS", "ITM", "UIO"), CITIES, strict=True))


def _rows(rng: random.Random) -> Rows:
    airports = [(code, city) for code, city in AIRPORTS]
    airlines = [(index, name) for index, name in enumerate(AIRLINES, 1)]
    pairs = evenly(rng, [(first, second) for first, _ in AIRPORTS for second, _ in AIRPORTS if first != second], 180)
    flights = []
    for index, (origin, target) in enumerate(pairs, 1):
        delay = rng.choice((0, 0, 0, rng.randrange(1, 30), rng.randrange(30, 240)))
        day = a_day(rng, (index - 1) % 36).isoformat()
        flights.append((index, rng.randrange(1, 5), origin, target, day, rng.randrange(60, 900), delay))
    bookings = [
        (index, rng.randrange(1, 171), name, rng.randrange(40, 900))
        for index, name in enumerate(rng.choices(some_names(rng, 40), k=320), 1)
    ]
    return {"airports": airports, "airlines": airlines, "flights": flights, "bookings": bookings}


SCHEMA = Schema(
    tables="""
CREATE TABLE airports (code TEXT PRIMARY KEY, city TEXT);
CREATE TABLE airlines (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE flights (id INTEGER PRIMARY KEY, airline_id INTEGER REFERENCES airlines(id),
    origin TEXT REFERENCES airports(code), target TEXT REFERENCES airports(code), day TEXT, minutes INTEGER,
    delay INTEGER);  -- minutes: in the air; delay: in minutes, 0 where it was on time
CREATE TABLE bookings (id INTEGER PRIMARY KEY, flight_id INTEGER REFERENCES flights(id), passenger TEXT, price INTEGER);
""",
    rows=_rows,
    values={
        "city": CITIES,
        "airline": AIRLINES,
        "year": YEARS,
        "delay": range(20, 90),
        "minutes": range(200, 600),
        "top": range(3, 8),
        "price": range(300, 700),
    },
    questions=read_questions("""
filter 1: List the ids of the flights of {year} that were more than {delay} minutes late.
SELECT id FROM flights WHERE delay > {delay} AND day LIKE '{year}-%'

filter 1 ordered: List id and price of the bookings that cost at least {price} dollars, the dearest first, equal
prices by id.
SELECT id, price FROM bookings WHERE price >= {price} ORDER BY price DESC, id

aggregate 2: How many flights of {year} are longer than {minutes} minutes?
SELECT COUNT(*) FROM flights WHERE minutes > {minutes} AND day LIKE '{year}-%'

join 2: List the ids of the flights of {airline} that were more than {delay} minutes late.
SELECT f.id FROM flights f JOIN airlines a ON a.id = f.airline_id WHERE a.name = '{airline}' AND f.delay > {delay}

join 2: List id and day of the flights that start in {city} in {year}.
SELECT f.id, f.day FROM flights f JOIN airports p ON p.code = f.origin WHERE p.city = '{city}' AND f.day LIKE
'{year}-%'

join 3: Which passengers have booked a flight of {airline} to {city}? List each name once.
SELECT DISTINCT b.passenger FROM bookings b JOIN flights f ON f.id = b.flight_id JOIN airlines a ON a.id =
f.airline_id JOIN airports p ON p.code = f.target WHERE a.name = '{airline}' AND p.city = '{city}'

group 3: For each airline, what is the average delay of its flights of {year}, rounded to two decimals? Give name and
average.
SELECT a.name, ROUND(AVG(f.delay), 2) FROM airlines a JOIN flights f ON f.airline_id = a.id WHERE f.day LIKE
'{year}-%' GROUP BY a.id

dates 3: On which days of the week do flights to {city} leave, and how many? Give the day as strftime's %w says it
(text, 0 is Sunday) and the number; leave out days without any.
SELECT strftime('%w', f.day), COUNT(*) FROM flights f JOIN airports p ON p.code = f.target WHERE p.city = '{city}'
GROUP BY 1

nested 4: Which flights of {airline} has nobody booked? List their ids.
SELECT f.id FROM flights f JOIN airlines a ON a.id = f.airline_id WHERE a.name = '{airline}' AND f.id NOT IN (SELECT
flight_id FROM bookings)

nested 4: Which flights from {city} take longer than the average flight of their airline? List their ids.
SELECT f.id FROM flights f JOIN airports p ON p.code = f.origin WHERE p.city = '{city}' AND f.minutes > (SELECT
AVG(g.minutes) FROM flights g WHERE g.airline_id = f.airline_id)

rank 5 ordered: Which {top} passengers paid most for flights of {year}? Give name and sum, the highest first, equal
sums by name.
SELECT b.passenger, SUM(b.price) AS paid FROM bookings b JOIN flights f ON f.id = b.flight_id WHERE f.day LIKE
'{year}-%' GROUP BY b.passenger ORDER BY paid DESC, b.passenger LIMIT {top}

rank 5: For each city from which flights start, which airline earned most by bookings of these flights? Only flights
of {year} count. Give city, airline and sum; of equal ones the first by name.
SELECT city, name, paid FROM (SELECT p.city, a.name, SUM(b.price) AS paid, ROW_NUMBER() OVER (PARTITION BY p.code
ORDER BY SUM(b.price) DESC, a.name) AS place FROM flights f JOIN airports p ON p.code = f.origin JOIN airlines a ON
a.id = f.airline_id JOIN bookings b ON b.flight_id = f.id WHERE f.day LIKE '{year}-%' GROUP BY p.code, a.id) WHERE
place = 1
"""),
)
