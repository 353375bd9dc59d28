"""Schema of a shop: customers, products, orders and order items."""

from __future__ import annotations

import random

from components.environments.worlds.sql.schemas.base import (
    CITIES,
    MONTHS,
    YEARS,
    Rows,
    Schema,
    a_day,
    evenly,
    read_questions,
    some_names,
)

CATEGORIES = ("books", "garden", "kitchen", "music", "toys")


def _rows(rng: random.Random) -> Rows:
    cities = evenly(rng, CITIES, 36)
    customers = [
        (index, name, cities[index - 1], a_day(rng, rng.randrange(12)).isoformat())
        for index, name in enumerate(some_names(rng, 36), 1)
    ]
    categories = evenly(rng, CATEGORIES, 25)
    words = [
        f"{adjective} {noun}"
        for adjective in ("Blue", "Red", "Old", "Tiny", "Grand")
        for noun in ("Box", "Set", "Kit", "Star", "Pack")
    ]
    products = [
        (index, word, categories[index - 1], rng.randrange(5, 200))
        for index, word in enumerate(rng.sample(words, 25), 1)
    ]
    buyers = rng.sample(range(1, 37), 31)  # some customers have no orders
    states = evenly(rng, ("paid", "paid", "shipped", "shipped", "shipped", "cancelled"), 144)
    orders = [
        (index, rng.choice(buyers), a_day(rng, (index - 1) % 36).isoformat(), states[index - 1])
        for index in range(1, 145)
    ]
    sold = rng.sample(range(1, 26), 22)
    items = [
        (order, product, rng.randrange(1, 9))
        for order in range(1, 145)
        for product in rng.sample(sold, rng.randrange(1, 5))
    ]
    return {"customers": customers, "products": products, "orders": orders, "items": items}


SCHEMA = Schema(
    tables="""
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), day TEXT,
    state TEXT);
CREATE TABLE items (order_id INTEGER REFERENCES orders(id), product_id INTEGER REFERENCES products(id),
    quantity INTEGER);
""",
    rows=_rows,
    values={
        "city": CITIES,
        "category": CATEGORIES,
        "state": ("paid", "shipped", "cancelled"),
        "year": YEARS,
        "month": MONTHS,
        "price": range(20, 90),
        "top": range(3, 8),
    },
    questions=read_questions("""
filter 1: What are the names of the customers from {city}?
SELECT name FROM customers WHERE city = '{city}'

filter 1: List name and price of the products that cost more than {price} dollars.
SELECT name, price FROM products WHERE price > {price}

filter 1 ordered: List names and prices of the products of the category {category}, the dearest first, equal prices by
name.
SELECT name, price FROM products WHERE category = '{category}' ORDER BY price DESC, name

aggregate 2: How many orders are in the state {state} and were made in {year}?
SELECT COUNT(*) FROM orders WHERE state = '{state}' AND day LIKE '{year}-%'

join 2: List the ids of all orders of customers from {city} that are {state}.
SELECT o.id FROM orders o JOIN customers c ON c.id = o.customer_id WHERE c.city = '{city}' AND o.state = '{state}'

aggregate 2: What is the average price of the products of the category {category}, rounded to two decimals?
SELECT ROUND(AVG(price), 2) FROM products WHERE category = '{category}'

group 3: For each category, how many pieces were sold in orders of {year}? Leave out cancelled orders, and categories
that sold nothing.
SELECT p.category, SUM(i.quantity) FROM items i JOIN products p ON p.id = i.product_id JOIN orders o ON o.id =
i.order_id WHERE o.day LIKE '{year}-%' AND o.state <> 'cancelled' GROUP BY p.category

dates 3: What is the turnover, price times quantity, of each month of {year}? Give the month as text of two digits,
and the turnover; orders that are cancelled do not count.
SELECT strftime('%m', o.day), SUM(i.quantity * p.price) FROM orders o JOIN items i ON i.order_id = o.id JOIN products
p ON p.id = i.product_id WHERE o.day LIKE '{year}-%' AND o.state <> 'cancelled' GROUP BY 1

dates 3: List the ids of the orders from {city} that were made within 300 days after the customer joined, the day of
the 300th day included.
SELECT o.id FROM orders o JOIN customers c ON c.id = o.customer_id WHERE c.city = '{city}' AND julianday(o.day) -
julianday(c.joined) BETWEEN 0 AND 300

nested 4: Which customers have no order that is {state}? List their names.
SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders WHERE state = '{state}')

nested 4: Which products cost more than the average product of their own category, and more than {price} dollars? List
their names.
SELECT name FROM products p WHERE price > {price} AND price > (SELECT AVG(price) FROM products q WHERE q.category =
p.category)

rank 5 ordered: Which {top} customers spent most in all orders that are not cancelled? Give name and sum (price times
quantity), the highest sum first, equal sums by name.
SELECT c.name, SUM(i.quantity * p.price) AS spent FROM customers c JOIN orders o ON o.customer_id = c.id JOIN items i
ON i.order_id = o.id JOIN products p ON p.id = i.product_id WHERE o.state <> 'cancelled' GROUP BY c.id ORDER BY spent
DESC, c.name LIMIT {top}

rank 5: For each city, which customer made the most orders in {year}, of any state? Give city, name and number; of
equal ones the first by name; leave out cities without orders in that year.
SELECT city, name, n FROM (SELECT c.city, c.name, COUNT(*) AS n, ROW_NUMBER() OVER (PARTITION BY c.city ORDER BY
COUNT(*) DESC, c.name) AS place FROM customers c JOIN orders o ON o.customer_id = c.id WHERE o.day LIKE '{year}-%'
GROUP BY c.id) WHERE place = 1
"""),
)
