"""Schema of a school: teachers, students, courses and exams."""

from __future__ import annotations

import random

from components.environments.worlds.sql.schemas.base import (
    YEARS,
    Rows,
    Schema,
    a_day,
    evenly,
    read_questions,
    some_names,
)

SUBJECTS = ("art", "biology", "chemistry", "latin", "maths")


def _rows(rng: random.Random) -> Rows:
    people = some_names(rng, 58)
    teachers = [(index, name) for index, name in enumerate(people[:10], 1)]
    classes = evenly(rng, ("7a", "7b", "8a", "8b"), 48)
    students = [
        (index, name, classes[index - 1], a_day(rng, rng.randrange(12)).replace(year=2010).isoformat())
        for index, name in enumerate(people[10:], 1)
    ]
    subjects = evenly(rng, SUBJECTS, 15)
    courses = [(index, subject, rng.randrange(1, 10), rng.randrange(1, 6)) for index, subject in enumerate(subjects, 1)]
    taken = [(student, course) for student in range(1, 49) for course in rng.sample(range(1, 15), rng.randrange(2, 6))]
    exams = [
        (index, student, course, a_day(rng, rng.randrange(36)).isoformat(), rng.randrange(20, 101))
        for index, (student, course) in enumerate(
            [enrolment for enrolment in taken for _ in range(rng.randrange(0, 4))], 1
        )
    ]
    return {"teachers": teachers, "students": students, "courses": courses, "enrolled": taken, "exams": exams}


SCHEMA = Schema(
    tables="""
CREATE TABLE teachers (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE students (id INTEGER PRIMARY KEY, name TEXT, class TEXT, born TEXT);
CREATE TABLE courses (id INTEGER PRIMARY KEY, subject TEXT, teacher_id INTEGER REFERENCES teachers(id), hours INTEGER);
CREATE TABLE enrolled (student_id INTEGER REFERENCES students(id), course_id INTEGER REFERENCES courses(id));
CREATE TABLE exams (id INTEGER PRIMARY KEY, student_id INTEGER REFERENCES students(id),
    course_id INTEGER REFERENCES courses(id), day TEXT, points INTEGER);  -- points: 0 to 100, 50 is a pass
""",
    rows=_rows,
    values={
        "class": ("7a", "7b", "8a", "8b"),
        "subject": SUBJECTS,
        "year": YEARS,
        "points": range(75, 92),
        "hours": (5, 6, 7, 8),
        "top": range(3, 8),
        "month": tuple(range(1, 13)),
    },
    questions=read_questions("""
filter 1: What are the names of the students of class {class}?
SELECT name FROM students WHERE class = '{class}'

filter 1 ordered: List id and points of the exams of {year} with at least {points} points, the best first, equal ones
by id.
SELECT id, points FROM exams WHERE points >= {points} AND day LIKE '{year}-%' ORDER BY points DESC, id

aggregate 2: How many exams of {year} had at least {points} points?
SELECT COUNT(*) FROM exams WHERE points >= {points} AND day LIKE '{year}-%'

join 2: Which teachers teach {subject}? List each name once.
SELECT DISTINCT t.name FROM teachers t JOIN courses c ON c.teacher_id = t.id WHERE c.subject = '{subject}'

join 3: Which students of class {class} are enrolled in a course of {subject}? List each name once.
SELECT DISTINCT s.name FROM students s JOIN enrolled e ON e.student_id = s.id JOIN courses c ON c.id = e.course_id
WHERE s.class = '{class}' AND c.subject = '{subject}'

group 3: For each class, what is the average of the points in exams of {subject}, rounded to two decimals? Leave out
classes without such exams.
SELECT s.class, ROUND(AVG(x.points), 2) FROM exams x JOIN students s ON s.id = x.student_id JOIN courses c ON c.id =
x.course_id WHERE c.subject = '{subject}' GROUP BY s.class

group 3: In which subjects do the courses together have at least {hours} hours? Give subject and hours.
SELECT subject, SUM(hours) FROM courses GROUP BY subject HAVING SUM(hours) >= {hours}

dates 3: How many exams were there in each month of {year}? Give the month as text of two digits and the number; leave
out months without any.
SELECT strftime('%m', day), COUNT(*) FROM exams WHERE day LIKE '{year}-%' GROUP BY 1

nested 4: Which students of class {class} have not passed any exam of {subject}? Those who took none count, too. List
their names.
SELECT name FROM students WHERE class = '{class}' AND id NOT IN (SELECT x.student_id FROM exams x JOIN courses c ON
c.id = x.course_id WHERE c.subject = '{subject}' AND x.points >= 50)

nested 4: Which exams of {year} in {subject} had more points than the average exam of the same course, over all years?
List their ids.
SELECT x.id FROM exams x JOIN courses c ON c.id = x.course_id WHERE c.subject = '{subject}' AND x.day LIKE '{year}-%'
AND x.points > (SELECT AVG(y.points) FROM exams y WHERE y.course_id = x.course_id)

rank 5 ordered: Which {top} students have the best average of points in exams of {year}, the average rounded to two
decimals? Give name and average, the best first, equal ones by name.
SELECT s.name, ROUND(AVG(x.points), 2) AS mean FROM students s JOIN exams x ON x.student_id = s.id WHERE x.day LIKE
'{year}-%' GROUP BY s.id ORDER BY mean DESC, s.name LIMIT {top}

rank 5: For each class, who had the most points in one exam of {year}? Give class, name and points; of equal ones the
first by name; leave out classes without exams in that year.
SELECT class, name, points FROM (SELECT s.class, s.name, x.points, ROW_NUMBER() OVER (PARTITION BY s.class ORDER BY
x.points DESC, s.name) AS place FROM students s JOIN exams x ON x.student_id = s.id WHERE x.day LIKE '{year}-%') WHERE
place = 1
"""),
)
