"""Script run by a program and by its test, each in a process and a sandbox of its own.

The program's process runs the program and then answers requests: read a name, call a function, read an attribute. The
test's process runs the test, in which the program's names are proxies that send such requests. Nothing of the program
is imported or unpickled there, and the test's text never leaves its process: the program sees the arguments of its
calls, and nothing that its results are compared with.

Plain data is copied: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range,
and from the standard library Counter, OrderedDict, defaultdict (as dict), deque, Decimal, Fraction, date, datetime and
timedelta. Types are exact: an instance of a subclass is not plain data. Any other object of the program stays in its
process; the test holds an `ObjectReference` reference that it may call, iterate, index and read attributes of, but not
compare. A test that names no class of the program expects plain data of its functions: there, what they return may only
be called, and iterated once, as closures and generators are. Otherwise a single object whose `__len__`, `__bool__` and
`__getattr__` answer anything would pass the tests of every function. Functions of the test may be passed to the
program, which calls them back. Exceptions are sent as type and arguments; types that the program defines are
represented by a subclass of their built-in base.

The program can tamper with everything in its own process, this script included, so its messages are untrusted: decoded
here, they can only be the types above. Only the standard library is imported, as little as possible, because the script
is run as text.
"""

from __future__ import annotations

import ast
import builtins
import json
import operator
import os
import sys
import types
from _thread import RLock, get_ident
from collections.abc import Callable, Iterator
from typing import Any

LARGEST = 4_000_000
"""Maximum bytes of a message."""
CHUNK = 60_000
"""Maximum bytes of a line: less than `components.sandbox.calls.LONGEST`."""

# A value that JSON cannot express is encoded as a list of its kind and its parts.
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_BYTES: dict[str, type] = {kind.__name__: kind for kind in (bytes, bytearray)}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (type(None), bool, int, float, complex, str, *_BYTES.values(), *_SEQUENCES.values(), dict, range)
}
_LIBRARY = {
    "collections.Counter": "Counter",
    "collections.OrderedDict": "OrderedDict",
    "collections.defaultdict": "dict",
    "collections.deque": "deque",
    "decimal.Decimal": "Decimal",
    "fractions.Fraction": "Fraction",
    "datetime.date": "date",
    "datetime.datetime": "datetime",
    "datetime.timedelta": "timedelta",
}
_JSON_INTEGER = 2**63

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *values, **named: function(*values, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "isinstance": isinstance,
}


_ON_RESULTS = ("call", "iter", "next")
"""Operations on objects that functions return, in a test that names no class of the program."""


class PeerDisconnected(BaseException):
    """Disconnection: the other side has ended."""


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON. refer: encodes a value that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_JSON_INTEGER < value < _JSON_INTEGER else ["int", hex(value)]
    if kind in _SEQUENCES.values():
        return [kind.__name__, *(encode(item, refer) for item in value)]
    if kind is dict:
        return ["dict", *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    if kind in _BYTES.values():
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", *(encode(part, refer) for part in (value.start, value.stop, value.step))]
    if kind is type and value in _TYPES.values():
        return ["type", value.__name__]
    name = _LIBRARY.get(f"{kind.__module__}.{kind.__qualname__}")
    if name in ("Counter", "OrderedDict", "dict"):
        return [name, *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    if name == "deque":
        return [name, *(encode(item, refer) for item in value)]
    if name == "Decimal":
        return [name, str(value)]
    if name == "Fraction":
        return [name, encode(value.numerator, refer), encode(value.denominator, refer)]
    if name in ("date", "datetime"):
        return [name, value.isoformat()]
    if name == "timedelta":
        return [name, value.days, value.seconds, value.microseconds]
    return refer(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """Return the value of JSON written by `encode`. resolve: decodes a value that is not plain data. Untrusted input
    may raise any Exception."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise TypeError("a message with an object in it")
        return data
    kind, *parts = data
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(part, resolve) for part in parts])
    if kind in ("dict", "Counter", "OrderedDict"):
        pairs = {decode(key, resolve): decode(item, resolve) for key, item in parts}
        return pairs if kind == "dict" else _library("collections", kind)(pairs)
    if kind in _BYTES:
        return _BYTES[kind].fromhex(parts[0])  # type: ignore[attr-defined]
    if kind == "int":
        return int(parts[0], 16)
    if kind == "complex":
        return complex(float(parts[0]), float(parts[1]))
    if kind == "range":
        return range(*(decode(part, resolve) for part in parts))
    if kind == "type":
        return _TYPES[parts[0]]
    if kind == "deque":
        return _library("collections", kind)([decode(part, resolve) for part in parts])
    if kind == "Decimal":
        return _library("decimal", kind)(str(parts[0]))
    if kind == "Fraction":
        return _library("fractions", kind)(*(int(decode(part, resolve)) for part in parts))
    if kind in ("date", "datetime"):
        return _library("datetime", kind).fromisoformat(parts[0])
    if kind == "timedelta":
        return _library("datetime", kind)(*(int(part) for part in parts))
    return resolve(data)


def _library(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


class Link:
    """Connection to the host: each JSON message gets one response."""

    def __init__(self, file: int):
        self._file = file
        self._read = bytearray()

    def exchange(self, message: Any) -> Any:
        """Send a message and return the response. Raises ValueError if it is too large, PeerDisconnected without a
        response."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST:
            raise ValueError(f"the value takes {len(data)} bytes; at most {LARGEST} can be passed")
        answer = b""
        for at in range(0, len(data), CHUNK):
            mark = b"+" if at + CHUNK < len(data) else b"."
            self._write(mark + data[at : at + CHUNK] + b"\n")
            answer = self._line()
        if not answer:
            raise PeerDisconnected
        return json.loads(answer)

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            raise PeerDisconnected from None

    def _line(self) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            try:
                more = os.read(self._file, 1_000_000)
            except OSError:
                raise PeerDisconnected from None
            if not more:
                raise PeerDisconnected
            self._read += more
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line


class Program:
    """Program's side: its objects by number, and the responses to requests."""

    def __init__(self, link: Link):
        self._link = link
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._thread = get_ident()
        self.names: dict[str, Any] = {}

    def run(self, code: str) -> None:
        """Run the program, then answer requests until the other side ends."""
        self.names = main_module()
        try:
            exec(compile(code, "program", "exec"), self.names)
            answer: Any = ["ready"]
        except SystemExit:
            answer = ["exit"]
        except BaseException as error:  # noqa: BLE001  any exception of the program is sent
            answer = ["raised", self._error(error)]
        self._until_returned(answer)

    def _until_returned(self, answer: Any) -> list[Any]:
        """Answer requests until a message is the result of a function of the test; return that message."""
        while True:
            try:
                request = self._link.exchange(answer)
            except ValueError as error:  # too large
                request = self._link.exchange(["raised", self._error(error)])
            if request[0] in ("returned", "failed"):
                return list(request)
            try:
                answer = self._execute(*request)
            except PeerDisconnected:
                raise
            except BaseException as error:  # noqa: BLE001  sent as above
                answer = ["raised", self._error(error)]

    def _execute(self, kind: str, *details: Any) -> Any:
        if kind == "evaluate":
            return ["json", json.dumps(eval(compile(details[0], "test", "eval"), self.names))]
        if kind == "get":
            if details[0] not in self.names:
                return ["missing"]
            return ["value", self._encode(self.names[details[0]])]
        name, values, named = details
        arguments = [self._decode(value) for value in values]
        keywords = {key: self._decode(value) for key, value in named.items()}
        result = self._encode(OPERATIONS[name](*arguments, **keywords))
        return ["value", result, name == "call" and self._changed(arguments[1:], values[1:])]

    def _changed(self, arguments: list[Any], values: list[Any]) -> bool:
        """Return True if a call changed one of its arguments; the test does not see that."""
        pairs = zip(arguments, values, strict=True)
        return any(type(value) in (list, dict, bytearray) and self._encode(value) != data for value, data in pairs)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, _Function):
            return ["function", value.number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self._kinds(value)]
        return ["object", self._number(value), type(value).__name__]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _resolve(self, data: list[Any]) -> Any:
        kind, number = data
        return _Function(self, number) if kind == "function" else self._objects[number]

    def _kinds(self, kind: type[BaseException]) -> list[Any]:
        """Return an exception's types that the program defines, each with its number, and the first built-in one."""
        kinds: list[Any] = []
        for base in kind.__mro__:
            if getattr(builtins, base.__name__, None) is base:
                return [*kinds, base.__name__]
            if issubclass(base, BaseException):
                kinds.append([self._number(base), base.__name__])
        return [*kinds, "Exception"]

    def _error(self, error: BaseException) -> Any:
        try:
            text = str(error)
        except Exception:  # noqa: BLE001  a program's own __str__
            text = ""
        try:
            arguments = [self._encode(value) for value in error.args]
        except Exception:  # noqa: BLE001  such as one that contains itself
            arguments = [text]
        return [self._kinds(type(error)), arguments, text]

    def call_back(self, number: int, values: Any, named: Any) -> Any:
        """Call a function of the test."""
        if get_ident() != self._thread:
            raise RuntimeError("a function of the test can only be called in the main thread")
        keywords = {key: self._encode(value) for key, value in named.items()}
        outcome = self._until_returned(["callback", number, [self._encode(value) for value in values], keywords])
        if outcome[0] == "failed":
            raise getattr(builtins, outcome[1], RuntimeError)
        return self._decode(outcome[1])


class _Function:
    """Proxy of a function of the test, for the program."""

    def __init__(self, program: Program, number: int):
        self._program = program
        self.number = number

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._program.call_back(self.number, values, named)


class Test:
    """Test's side: requests to the program, and their results."""

    __test__ = False

    def __init__(self, link: Link):
        self._link = link
        self._lock = RLock()
        self._functions: list[Callable[..., Any]] = []
        self._opaque: dict[tuple[int, bool], ObjectReference] = {}
        self._expects_objects = True
        self._iterators: dict[int, Any] = {}
        """Iterator of each returned object that the test iterates, by its number."""
        self._exhausted: set[int] = set()
        """Numbers of the iterators that have ended."""
        self._exceptions: dict[int, type[Exception]] = {}
        self.gone = False
        self.changed = False
        """True if a call changed its arguments in the program; the test has its own copies."""

    def run(self, test: str) -> Any:
        """Return the verdict on a test: passed, failed with a reason, or invalid with a reason."""
        try:
            tree = ast.parse(test, "test")
            code = compile(tree, "test", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return ["invalid", f"does not compile: {type(error).__name__}: {error}"]
        names = Names(self, tree)
        if len(names.shadowed) > 1:
            listed = ", ".join(sorted(names.shadowed))
            return ["invalid", f"calls only functions that are built-in, {listed}, so it is unclear which is tested"]
        self._expects_objects = names.class_named
        try:
            names.look_up()
            exec(code, names)
        except BaseException as error:  # noqa: BLE001  any exception fails the test
            return ["failed", f"it raised {_described(error, test)}{self._hint()}"]
        return ["failed", "the program ended before the test was over"] if self.gone else ["passed"]

    def _hint(self) -> str:
        return (
            ". A call changed its arguments, of which the test sees copies: such a test is written "
            '{"call": ..., "result": ...}'
            if self.changed
            else ""
        )

    def get(self, name: str) -> Any:
        """Return the value of a name of the program. Raise KeyError if the program does not define it."""
        answer = self._ask(["get", name])
        if answer[0] != "value":
            raise KeyError(name)
        return decode(answer[1], lambda data: self._resolve(data, named=True))

    def do(self, operation: str, *values: Any, **named: Any) -> Any:
        """Execute an operation in the program and return its result."""
        if type(values[0]) is ObjectReference and is_result(values[0]):
            return self._do_with_result(operation, *values, **named)
        return self._do(operation, *values, **named)

    def _do_with_result(self, operation: str, result: ObjectReference, *values: Any, **named: Any) -> Any:
        """Execute an operation on an object that a function returned."""
        number = number_of(result)
        if operation not in _ON_RESULTS:
            raise TypeError(
                f"{operation}: a function of the program returns a {name_of(result)}, which is no plain data; a test "
                "of objects names their class"
            )
        if operation == "iter":
            if number not in self._iterators:
                self._iterators[number] = self._do(operation, result)
            iterator = self._iterators[number]
            if type(iterator) is ObjectReference and number_of(iterator) in self._exhausted:
                raise TypeError(f"a {name_of(result)} that a function of the program returns can be iterated once")
            return iterator
        if operation == "next" and number in self._exhausted:
            raise StopIteration
        try:
            return self._do(operation, result, *values, **named)
        except StopIteration:
            self._exhausted.add(number)
            raise

    def _do(self, operation: str, *values: Any, **named: Any) -> Any:
        keywords = {key: self._encode(value) for key, value in named.items()}
        answer = self._ask(["do", operation, [self._encode(value) for value in values], keywords])
        if answer[0] == "raised":
            raise self._error(answer[1], operation == "next") from None
        self.changed = self.changed or answer[2] is True
        return self._decode(answer[1])

    def _ask(self, request: Any) -> list[Any]:
        with self._lock:
            if self.gone:
                raise PeerDisconnected
            try:
                answer = self._link.exchange(request)
                while answer[0] == "callback":
                    answer = self._link.exchange(self._called_back(*answer[1:]))
            except PeerDisconnected:
                self.gone = True
                raise
        return list(answer)

    def _called_back(self, number: int, values: list[Any], named: dict[str, Any]) -> Any:
        try:
            arguments = [self._decode(value) for value in values]
            keywords = {key: self._decode(value) for key, value in named.items()}
            return ["returned", self._encode(self._functions[number](*arguments, **keywords))]
        except Exception as error:  # noqa: BLE001  re-raised in the program, which is the caller
            name = type(error).__name__
            return ["failed", name if name in _EXCEPTIONS else "RuntimeError"]  # its text may tell what is expected

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> Any:
        if type(value) is ObjectReference:
            return ["object", number_of(value)]
        for number, kind in self._exceptions.items():
            if value is kind:
                return ["object", number]
        if callable(value):
            self._functions.append(value)
            return ["function", len(self._functions) - 1]
        raise TypeError(f"the test passes a {type(value).__name__} to the program, which is no plain data")

    def _resolve(self, data: list[Any], named: bool = False) -> Any:
        """Return a value that is no plain data. named: the test refers to it by a name of the program."""
        if data[0] == "object":
            _, number, name = data
            if type(number) is not int or type(name) is not str:
                raise TypeError("a message that is no reference")
            result = not named and not self._expects_objects
            return self._opaque.setdefault((number, result), ObjectReference(self, number, name, result))
        if data[0] == "function":
            return self._functions[data[1]]
        if data[0] == "exception":
            return self._exception(data[1])
        raise TypeError(f"a message with {data[0]!r:.40} in it")

    def _exception(self, kinds: list[Any]) -> type[Exception]:
        """Return the exception type that represents one of the program's."""
        *own, base = kinds
        kind = _EXCEPTIONS.get(base, RuntimeError)
        for number, name in reversed(own):
            if number not in self._exceptions:
                self._exceptions[number] = type(str(name), (kind,), {})
            kind = self._exceptions[number]
        return kind

    def _error(self, error: Any, iterates: bool) -> BaseException:
        kinds, arguments, text = error
        if iterates and kinds == ["StopIteration"]:
            return StopIteration()
        try:
            if kinds[-1] not in _EXCEPTIONS:
                return RuntimeError(f"{kinds[-1]}: {text}")
            return self._exception(kinds)(*(self._decode(value) for value in arguments))
        except Exception:  # noqa: BLE001  the type rejects the arguments
            return RuntimeError(f"{kinds[-1]}: {text}")


_EXCEPTIONS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration)  # would silently end a loop of the test
}


class Names(dict[str, Any]):
    """Namespace of a test: its own names, Python's, and for any other a lookup in the program.

    Names that affect a comparison must not be the program's: built-in names are Python's, and so is a module of the
    standard library whose attributes the test uses, even if only the program imports it. A name such as `sum` refers to
    the program's function only if the test uses no other undefined name (`shadowed`).
    """

    def __init__(self, test: Test, tree: ast.Module):
        super().__init__(main_module())
        self._test = test
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self._free = {name for name in used - _defined(tree) if not name.startswith("__")}
        self._modules = (self._free & sys.stdlib_module_names) - _used_whole(tree)
        own = {name for name in self._free - self._modules if not hasattr(builtins, name)}
        self.class_named = any(name[0].isupper() for name in own)
        """True if the test names a class of the program, told by its initial: the program itself is no evidence."""
        self.shadowed = set() if own else self._free & _SHADOWABLE

    def look_up(self) -> None:
        """Look up the functions and classes of the program that the test names. Other values are read at each use."""
        for name in sorted(self._free):
            try:
                value = self[name]
            except KeyError:  # built-in, or undefined
                continue
            if type(value) is ObjectReference or isinstance(value, (type, types.ModuleType)):
                self[name] = value

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return __import__(name)
        hidden = hasattr(builtins, name) or (name.startswith("__") and name.endswith("__"))
        if hidden and name not in self.shadowed:
            raise KeyError(name)
        return self._test.get(name)


_SHADOWABLE = {
    function.__name__
    for function in (abs, all, any, bin, chr, divmod, enumerate, filter, hash, hex, len, map, max, min, oct, ord, pow)
} | {"range", "reversed", "round", "sorted", "sum", "zip"}
"""Built-in names that a task may use as the name of the requested function."""


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that a test binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _used_whole(tree: ast.Module) -> set[str]:
    """Return the names that a test uses other than to read an attribute; a module is not used like that."""
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases}


class ObjectReference:
    """Reference to an object of the program. It is never compared: the program's answer would be no evidence."""

    __slots__ = ("__name", "__number", "__result", "__test")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, test: Test, number: int, name: str, result: bool = False):
        """Set the object. result: a function returned it to a test that expects plain data."""
        attributes = {"test": test, "number": number, "name": name, "result": result}
        for attribute, value in attributes.items():
            object.__setattr__(self, f"_ObjectReference__{attribute}", value)

    def __getattr__(self, name: str) -> Any:
        return self.__test.do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__test.do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__test.do("delattr", self, name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.__test.do("call", self, *values, **named)

    def __getitem__(self, key: Any) -> Any:
        return self.__test.do("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__test.do("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.__test.do("delitem", self, key)

    def __len__(self) -> int:
        return self.__plain("len", int)

    def __bool__(self) -> bool:
        return self.__plain("bool", bool)

    def __str__(self) -> str:
        return self.__plain("str", str)

    def __repr__(self) -> str:
        return self.__plain("repr", str)

    def __iter__(self) -> Iterator[Any]:
        return self.__test.do("iter", self)

    def __next__(self) -> Any:
        return self.__test.do("next", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is ObjectReference and self.__test.do("isinstance", instance, self) is True

    def __plain(self, operation: str, kind: type) -> Any:
        value = self.__test.do(operation, self)
        if type(value) is not kind:
            raise TypeError(f"{operation} of a {self.__name} is no {kind.__name__}")
        return value

    def __eq__(self, other: object) -> bool:
        if other is None or other is self:
            return other is self
        raise self.__incomparable()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        raise self.__incomparable()

    __le__ = __gt__ = __ge__ = __lt__

    def __incomparable(self) -> TypeError:
        return TypeError(
            f"a {self.__name} of the program is no plain data and cannot be compared; compare what it holds"
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise TypeError(f"the test subclasses {self.__name} of the program, which is in another process")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {self.__name} of the program cannot be copied to the test")


def number_of(value: ObjectReference) -> int:
    """Return the number of the referenced object."""
    return object.__getattribute__(value, "_ObjectReference__number")


def name_of(value: ObjectReference) -> str:
    """Return the name of the class of the referenced object."""
    return object.__getattribute__(value, "_ObjectReference__name")


def is_result(value: ObjectReference) -> bool:
    """Return True if a function returned the referenced object to a test that expects plain data."""
    return object.__getattribute__(value, "_ObjectReference__result")


def main_module() -> dict[str, Any]:
    """Return the namespace of a new `__main__`, so that the executed code finds nothing of this script there."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def _described(error: BaseException, test: str) -> str:
    """Return type and message of an exception, and the line of the test that raised it."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  a test's own __str__
        message = ""
    number, at = 0, error.__traceback__
    while at is not None:
        number = at.tb_lineno if at.tb_frame.f_code.co_filename == "test" else number
        at = at.tb_next
    line = test.splitlines()[number - 1].strip()[:100] if number else ""
    name = type(error).__name__[:60]
    return f"{name}{': ' if message else ''}{message[:200]}{f' in `{line}`' if line else ''}"


def main() -> None:
    given = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115  to the end of the process
    link = Link(int(os.environ.pop("CALLS")))
    try:
        if "program" in given:
            Program(link).run(given["program"])
        else:
            verdict = Test(link).run(given["test"])
            link.exchange(["verdict", *verdict])
    except PeerDisconnected:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
