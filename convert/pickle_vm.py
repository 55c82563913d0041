"""A pickle machine that cannot run anything: it turns an untrusted stream into plain values.

- Every opcode of protocols 0 to 5 is handled here; Python's own pickle module takes no part.
- Globals are never imported. `find_global(module, name)` gives a `Global`, which either carries one of our own
  builders or stays a mere name; calling a mere name records an `Opaque`, and `may_call` can refuse that.
- BUILD never looks up `__setstate__`, NEWOBJ never calls `__new__`, nothing is set on a real object.
- Memory is bounded by the bytes read so far (`_spend`), and there is no recursion, so a small hostile stream
  cannot make a large value, a long loop or a deep stack.

The machine knows nothing of torch: torch_file.py brings the globals and the persistent ids.
"""

import codecs
import re
import struct
from array import array

from mlx_cosyh3.convert.pickle_tree import Global, Opaque, bomb, check_tree, damaged
from mlx_cosyh3.errors import CheckpointError

# What a stream may cost in memory. State dicts cost 15 to 40 bytes per byte of stream (protocol 4, tensors of one
# shared storage); the weights themselves are not in the stream.
MEMORY_PER_BYTE = 64
MEMORY_SLACK = 16 << 20  # bytes, so that short streams need no exact accounting
MAX_LONG_BYTES = 512  # a pickled int: seeds, hashes and magic numbers need 16
MAX_LINE = 1 << 20  # text arguments of protocol 0
MAX_KEY_ITEMS = 16  # length of a tuple that serves as a key
MAX_TUPLE_KEYS = 4096  # integer tuples can be made to collide at will, so a table may hold only so many

_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescape(match):
    code = match.group(1)
    if len(code) == 3:
        return bytes([int(code[1:], 16)])
    if code not in _ESCAPED:
        raise damaged(f"escape \\{code!r} in a string")
    return _ESCAPED[code]


def _text(raw):
    """UTF-8, or the bytes themselves: strings of Python 2 may hold anything."""
    try:
        return str(raw, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return bytes(raw)


class PickleMachine:
    """Runs one stream of `buffer` (bytes or mmap) from `start`; `position` is behind its STOP afterwards.

    find_global(module, name) -> Global       raises CheckpointError for a name that has no place in a checkpoint
    may_call(global_)                         raises CheckpointError if calling that name is suspicious
    persistent_load(id) -> value              None: the stream may hold no persistent ids
    """

    def __init__(self, buffer, start, end, find_global, may_call, persistent_load=None):
        self.buffer, self.start, self.position, self.end = buffer, start, start, end
        self.find_global, self.may_call, self.persistent_load = find_global, may_call, persistent_load
        self.stack = []
        self.marks = array("q")  # heights of the stack at each open MARK
        self.fence = 0  # the last of them: nothing may be popped below it
        self.memo = []  # ids are handed out in order by every real pickler ...
        self.sparse_memo = {}  # ... and a stream that skips some pays for it here
        self.spent = 0
        self.tuple_keys = 0

    def load(self):
        """The stream's value: a tree that a plain walk can finish (pickle_tree.check_tree)."""
        while True:
            code = self._take(1)[0]
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise damaged(f"unknown opcode 0x{code:02x} at byte {self.position - 1}")
            cost, run = operation
            self._spend(cost)
            if run is None:  # STOP
                break
            run(self)
        value = self._pop()
        if self.stack or self.marks:
            raise damaged("values are left over at its end")
        check_tree(value, self.position - self.start)
        return value

    # -- bytes in ------------------------------------------------------------------------------------------

    def _spend(self, cost):
        self.spent += cost
        if self.spent > MEMORY_SLACK + MEMORY_PER_BYTE * (self.position - self.start):
            raise bomb(f"its first {self.position - self.start} bytes ask for {self.spent >> 20} MB of memory")

    def _take(self, size):
        position = self.position
        if size > self.end - position:
            raise CheckpointError(f"truncated or damaged: its pickle needs {size} more bytes at byte {position}, "
                                  f"and {self.end - position} are left")
        self.position = position + size
        return self.buffer[position:position + size]

    def _number(self, layout, size):
        return struct.unpack(layout, self._take(size))[0]

    def _sized(self, layout, size):
        """A length, and as many bytes."""
        return self._take(self._number(layout, size))  # checked against what is left before anything is copied

    def _line(self):
        stop = self.buffer.find(b"\n", self.position, min(self.end, self.position + MAX_LINE))
        if stop < 0:
            raise damaged(f"the line at byte {self.position} has no end")
        raw = self._take(stop - self.position)
        self.position += 1
        return raw

    def _word(self, raw, what):
        word = _text(raw)
        if not isinstance(word, str) or len(word) > 1000:
            raise damaged(f"{what} is no name")
        return word

    # -- stack -----------------------------------------------------------------------------------------------

    def _push(self, value):
        self.stack.append(value)

    def _pop(self):
        if len(self.stack) <= self.fence:
            raise damaged(f"nothing to take from the stack before byte {self.position}")
        return self.stack.pop()

    def _top(self):
        if len(self.stack) <= self.fence:
            raise damaged(f"nothing on the stack before byte {self.position}")
        return self.stack[-1]

    def _mark(self):
        self.marks.append(len(self.stack))
        self.fence = len(self.stack)

    def _since_mark(self):
        if not self.marks:
            raise damaged(f"no mark before byte {self.position}")
        height = self.marks.pop()
        self.fence = self.marks[-1] if self.marks else 0
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def _discard(self):
        if self.marks and self.fence == len(self.stack):
            self._since_mark()
        else:
            self._pop()

    # -- memo ------------------------------------------------------------------------------------------------

    def _put(self, index):
        if index == len(self.memo):
            self.memo.append(self._top())
        elif 0 <= index < len(self.memo):
            self.memo[index] = self._top()
        else:
            self._spend(120)
            self.sparse_memo[index] = self._top()

    def _memoize(self):
        self._put(len(self.memo) + len(self.sparse_memo))

    def _get(self, index):
        if 0 <= index < len(self.memo):
            self._push(self.memo[index])
        elif index in self.sparse_memo:
            self._push(self.sparse_memo[index])
        else:
            raise damaged(f"memo {index} is used before it is set")

    # -- numbers and text ------------------------------------------------------------------------------------

    def _integer(self, raw):
        if len(raw) > 2 * MAX_LONG_BYTES:
            raise bomb(f"an integer of {len(raw)} digits")
        try:
            return int(raw)
        except ValueError:
            raise damaged(f"{bytes(raw[:20])!r} is no integer") from None

    def _int_line(self):
        raw = self._line()
        self._push({b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else self._integer(raw))

    def _long_line(self):
        self._push(self._integer(self._line().rstrip(b"L")))

    def _long(self, size):
        if not 0 <= size <= MAX_LONG_BYTES:
            raise bomb(f"an integer of {size} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _float_line(self):
        raw = self._line()
        try:
            self._push(float(raw))
        except ValueError:
            raise damaged(f"{bytes(raw[:20])!r} is no number") from None

    def _string_line(self):
        raw = self._line()
        if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[-1:] != raw[:1]:
            raise damaged("a string without quotes")
        self._push(_text(_ESCAPE.sub(_unescape, raw[1:-1])))

    def _unicode_line(self):
        try:
            self._push(codecs.raw_unicode_escape_decode(self._line())[0])
        except UnicodeDecodeError:
            raise damaged(f"bad text before byte {self.position}") from None

    def _sized_signed(self):
        length = self._number("<i", 4)
        if length < 0:
            raise damaged(f"a string of {length} bytes")
        return self._take(length)

    def _unicode(self, raw):
        self._spend(2 * len(raw))
        self._push(_text(raw))

    def _frame(self):
        size = self._number("<Q", 8)
        if size > self.end - self.position:
            raise damaged(f"a frame of {size} bytes where {self.end - self.position} are left")

    def _proto(self):
        version = self._take(1)[0]
        if version > 5:
            raise damaged(f"pickle protocol {version}; 0 to 5 exist")

    # -- containers ------------------------------------------------------------------------------------------

    def _key(self, key):
        """Only keys whose hash is cheap, and cannot be made to collide in numbers, may enter a table."""
        if isinstance(key, tuple):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                raise bomb(f"more than {MAX_TUPLE_KEYS} tuples as keys")
            if len(key) > MAX_KEY_ITEMS:
                raise CheckpointError(f"a tuple of {len(key)} items as a key; up to {MAX_KEY_ITEMS} are read")
            parts = key
        else:
            parts = (key,)
        for part in parts:
            if isinstance(part, int):
                if not -2 ** 63 <= part < 2 ** 63:
                    raise bomb("an integer beyond 64 bits as a key")
            elif isinstance(part, (tuple, list, dict, set, frozenset, bytearray, complex, slice, range)):
                raise CheckpointError(f"a {type(part).__name__} as a key; texts, numbers and flat tuples are read")
        return key  # foreign objects and tensors are their own keys: they compare by identity

    def set_pairs(self, table, values):
        if len(values) % 2:
            raise damaged(f"a key without a value before byte {self.position}")
        self._spend(100 * (len(values) // 2 + 1))
        for key, value in zip(values[::2], values[1::2]):
            table[self._key(key)] = value

    def _set_items(self, values):
        target = self._top()
        if isinstance(target, Opaque) and not isinstance(target, Global):
            if target.entries is None:
                target.entries = {}
            target = target.entries
        if not isinstance(target, dict):
            raise damaged(f"items are set in a {type(target).__name__}")
        self.set_pairs(target, values)

    def _set_item(self):
        value, key = self._pop(), self._pop()
        self._set_items((key, value))

    def _append(self, values):
        target = self._top()
        if isinstance(target, Opaque) and not isinstance(target, Global):
            if target.items is None:
                target.items = []
            target = target.items
        if not isinstance(target, list):
            raise damaged(f"values are appended to a {type(target).__name__}")
        target.extend(values)

    def _append_one(self):
        value = self._pop()
        self._append((value,))

    def _dict(self):
        table = {}
        self.set_pairs(table, self._since_mark())
        self._push(table)

    def set_of(self, kind, values):
        self._spend(100 * len(values))
        return kind([self._key(value) for value in values])

    def _add_items(self):
        values, target = self._since_mark(), self._top()
        if not isinstance(target, set):
            raise damaged(f"items are added to a {type(target).__name__}")
        target.update(self.set_of(list, values))

    def _last(self, count):
        values = [self._pop() for _ in range(count)]
        return tuple(values[::-1])

    # -- names and calls -------------------------------------------------------------------------------------

    def _global_lines(self):
        module = self._word(self._line(), "a module")
        return self.find_global(module, self._word(self._line(), "a global"))

    def _stack_global(self):
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str) and len(name) + len(module) <= 2000):
            raise damaged(f"STACK_GLOBAL without two names before byte {self.position}")
        self._push(self.find_global(module, name))

    def _extension(self, layout, size):
        code = self._number(layout, size)
        raise CheckpointError(f"not a plain checkpoint: it names global number {code} of Python's extension "
                              "registry, which is unknown here")

    def call(self, function, args):
        """What replaces every call: our own builder, or a record that the call stood there."""
        if not isinstance(function, Global):
            kind = type(function).__name__
            raise CheckpointError(f"not a plain checkpoint: it would call a {kind} that it made")
        if not isinstance(args, tuple):
            raise damaged(f"{function.name} is called with a {type(args).__name__} for arguments")
        if function.build is not None:
            return function.build(self, *args)
        self.may_call(function)
        return Opaque(function.name, args)

    def _reduce(self):
        args, function = self._pop(), self._pop()
        self._push(self.call(function, args))

    def instance(self, cls, args, what):
        """NEWOBJ: only classes come here in a real pickle, so any name that find_global let pass is recorded."""
        if not isinstance(cls, Global) or not isinstance(args, tuple):
            raise damaged(f"{what} of a {type(cls).__name__}")
        return cls.build(self, *args) if cls.build is not None else Opaque(cls.name, args)

    def _new_object(self):
        args, cls = self._pop(), self._pop()
        self._push(self.instance(cls, args, "NEWOBJ"))

    def _new_object_ex(self):
        kwargs, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(kwargs, dict):
            raise damaged(f"NEWOBJ_EX with a {type(kwargs).__name__} for keywords")
        if isinstance(cls, Global) and cls.build is not None and kwargs:
            raise damaged(f"{cls.name} is made with keywords")
        value = self.instance(cls, args, "NEWOBJ_EX")
        if kwargs:
            value.args = (args, kwargs)
        self._push(value)

    def _inst(self):
        cls = self._global_lines()
        self._push(self.call(cls, tuple(self._since_mark())))

    def _obj(self):
        values = self._since_mark()
        if not values:
            raise damaged(f"OBJ without a class before byte {self.position}")
        self._push(self.call(values[0], tuple(values[1:])))

    def _build(self):
        """State is recorded on foreign objects, and dropped elsewhere: attributes of OrderedDicts and tensors."""
        state, target = self._pop(), self._top()
        if isinstance(target, Opaque) and not isinstance(target, Global):
            if target.state is not None:
                raise damaged(f"state is set twice on {target.name}")
            target.state = state
        elif isinstance(target, (Global, list, tuple, str, int, float, bytes, type(None))):
            raise damaged(f"state is set on a {type(target).__name__}")

    def _persistent(self, saved_id):
        if self.persistent_load is None:
            raise damaged("a persistent id where none belongs")
        self._push(self.persistent_load(saved_id))

    def copied(self, values):
        """Builders that copy a container pay for it, so that copying one again and again is not free."""
        if not isinstance(values, (list, tuple, set, frozenset, dict, bytes, bytearray, str)):
            raise damaged(f"a {type(values).__name__} where a container belongs")
        self._spend(64 + len(values) * (1 if isinstance(values, (bytes, bytearray, str)) else 100))
        return values


def _pusher(value):
    return lambda machine: machine._push(value)


def _reader(read):
    """An opcode that pushes what `read(machine)` gives."""
    return lambda machine: machine._push(read(machine))


M = PickleMachine
_PLAIN = 16  # a place on the stack
# opcode -> (memory it may take in bytes, what it does); sizes of CPython's objects, rounded up
_OPERATIONS = {
    # control
    0x80: (0, M._proto),
    0x95: (0, M._frame),
    b".": (0, None),
    b"(": (_PLAIN, M._mark),
    b"0": (0, M._discard),
    b"1": (0, M._since_mark),
    b"2": (_PLAIN, _reader(M._top)),
    # constants and numbers
    b"N": (_PLAIN, _pusher(None)),
    0x88: (_PLAIN, _pusher(True)),
    0x89: (_PLAIN, _pusher(False)),
    b"I": (48, M._int_line),
    b"L": (48, M._long_line),
    b"F": (48, M._float_line),
    b"J": (48, _reader(lambda m: m._number("<i", 4))),
    b"K": (_PLAIN, _reader(lambda m: m._take(1)[0])),
    b"M": (48, _reader(lambda m: m._number("<H", 2))),
    0x8A: (48, lambda m: m._long(m._take(1)[0])),
    0x8B: (48, lambda m: m._long(m._number("<i", 4))),
    b"G": (48, _reader(lambda m: m._number(">d", 8))),
    # text and bytes
    b"S": (80, M._string_line),
    b"T": (80, lambda m: m._unicode(m._sized_signed())),
    b"U": (80, lambda m: m._unicode(m._sized("<B", 1))),
    b"V": (80, M._unicode_line),
    b"X": (80, lambda m: m._unicode(m._sized("<I", 4))),
    0x8C: (80, lambda m: m._unicode(m._sized("<B", 1))),
    0x8D: (80, lambda m: m._unicode(m._sized("<Q", 8))),
    b"B": (64, _reader(lambda m: m._sized("<I", 4))),
    b"C": (64, _reader(lambda m: m._sized("<B", 1))),
    0x8E: (64, _reader(lambda m: m._sized("<Q", 8))),
    0x96: (80, _reader(lambda m: bytearray(m._sized("<Q", 8)))),
    # containers
    b")": (_PLAIN, _pusher(())),
    0x85: (72, _reader(lambda m: m._last(1))),
    0x86: (80, _reader(lambda m: m._last(2))),
    0x87: (88, _reader(lambda m: m._last(3))),
    b"t": (64, _reader(lambda m: tuple(m._since_mark()))),
    b"]": (72, _reader(lambda m: [])),
    b"l": (72, _reader(M._since_mark)),
    b"a": (48, M._append_one),
    b"e": (_PLAIN, lambda m: m._append(m._since_mark())),
    b"}": (80, _reader(lambda m: {})),
    b"d": (80, M._dict),
    b"s": (0, M._set_item),
    b"u": (0, lambda m: m._set_items(m._since_mark())),
    0x8F: (232, _reader(lambda m: set())),
    0x90: (0, M._add_items),
    0x91: (232, _reader(lambda m: m.set_of(frozenset, m._since_mark()))),
    # memo
    b"p": (_PLAIN, lambda m: m._put(m._integer(m._line()))),
    b"q": (_PLAIN, lambda m: m._put(m._take(1)[0])),
    b"r": (_PLAIN, lambda m: m._put(m._number("<I", 4))),
    0x94: (_PLAIN, M._memoize),
    b"g": (_PLAIN, lambda m: m._get(m._integer(m._line()))),
    b"h": (_PLAIN, lambda m: m._get(m._take(1)[0])),
    b"j": (_PLAIN, lambda m: m._get(m._number("<I", 4))),
    # names, calls, objects; a tensor takes about 240
    b"c": (400, _reader(M._global_lines)),
    0x93: (400, M._stack_global),
    b"R": (240, M._reduce),
    0x81: (240, M._new_object),
    0x92: (360, M._new_object_ex),
    b"i": (240, M._inst),
    b"o": (240, M._obj),
    b"b": (0, M._build),
    b"P": (240, lambda m: m._persistent(m._word(m._line(), "a persistent id"))),
    b"Q": (240, lambda m: m._persistent(m._pop())),
    0x82: (0, lambda m: m._extension("<B", 1)),
    0x83: (0, lambda m: m._extension("<H", 2)),
    0x84: (0, lambda m: m._extension("<i", 4)),
}
_OPERATIONS = {code if isinstance(code, int) else code[0]: row for code, row in _OPERATIONS.items()}
