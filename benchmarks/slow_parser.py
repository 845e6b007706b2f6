"""A character-by-character version of `parse_rollout`, following decision 32.

It is the reference for tests and benchmarks of the fast parser. Both share only the types of the
result. The text is a string with one character per byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.records import ALL_GEOMETRY, GeometryKind
from shared.tokens.vocabulary import TokenCodec

SPACE = " \t\n\r"


@dataclass
class Symbol:
    """A symbol at the top level of an answer's JSON object.

    It is a string, a nested object, a punctuation mark or a word.
    """

    kind: str
    start: int
    end: int


@dataclass
class Leaf:
    """A JSON value that is not an array or object; it may be an unquoted coordinate token."""

    start: int
    end: int
    quoted: bool
    coord: int | None
    """Position of the token in the answer, if the value is a coordinate token; else None."""


@dataclass
class Tokens:
    """An answer as tokens and as text, with a mapping from bytes back to tokens."""

    ids: list[int]
    text: str
    owner: list[int]
    """For each byte of the text: the position of its token."""
    coords: dict[tuple[int, int], int]
    """Position of each coordinate token, by its byte span."""

    @classmethod
    def of(cls, ids: list[int], codec: TokenCodec) -> Tokens:
        text = ""
        owner = []
        coords = {}
        for position, token_id in enumerate(ids):
            piece = codec.piece_bytes(token_id).decode("latin-1")
            if codec.coord_bin(token_id) is not None:
                coords[len(text), len(text) + len(piece)] = position
            text += piece
            owner += [position] * len(piece)
        return cls(ids, text, owner, coords)


def slow_parse(
    token_ids: list[int], codec: TokenCodec, geometry: frozenset[GeometryKind] = ALL_GEOMETRY
) -> ParsedRollout:
    ids: list[int] = []
    for token_id in token_ids:
        if token_id == codec.eos_token_id:
            break
        ids.append(token_id)
    tokens = Tokens.of(ids, codec)
    text = tokens.text.split("<|im_end|>")[0]
    symbols, closed = read_symbols(text)
    entries = read_entries(text, symbols)
    num_behind = count_shapes(text, symbols[-1].end) if closed else 0
    for entry in reversed(entries):
        if entry.value is not None:
            kept = cut_tokens(tokens, text, entry.value.end, codec)
            if kept is not None:
                found = answer(
                    entries, kept, text[: entry.value.end], not closed, tokens, codec, geometry
                )
                return replace(found, num_behind=num_behind)
    return ParsedRollout(
        tuple(codec.encode("{")), "{", (), (), None, not closed, True, num_behind=num_behind
    )


def count_shapes(text: str, start: int) -> int:
    """Return the number of geometry keys in the text from `start` on."""
    number = 0
    for kind in GeometryKind:
        key = f'"{kind}"'
        for position in range(start, len(text)):
            if text.startswith(key, position):
                number += text[position + len(key) :].lstrip(SPACE).startswith(":")
    return number


def read_symbols(text: str) -> tuple[list[Symbol], bool]:
    """Return the symbols of the answer's JSON object with its braces, and whether it is closed.

    If the answer begins with other text, the result is an empty list and False.
    """
    symbols: list[Symbol] = []
    depth = 0
    start = 0
    in_string = False
    escaped = False
    for position, character in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
                if depth == 1:
                    symbols.append(Symbol('"', start, position + 1))
        elif depth == 0:
            if character == "{":
                depth = 1
                symbols.append(Symbol("{", position, position + 1))
            elif character not in SPACE:
                return [], False
        elif character == '"':
            in_string = True
            start = position if depth == 1 else start
        elif character == "{":
            depth += 1
            start = position if depth == 2 else start
        elif character == "}":
            depth -= 1
            if depth < 2:
                symbols.append(
                    Symbol("{}", start, position + 1)
                    if depth
                    else Symbol("}", position, position + 1)
                )
            if depth == 0:
                return symbols, True
        elif depth == 1 and character in "[],:":
            symbols.append(Symbol(character, position, position + 1))
        elif depth == 1 and character not in SPACE:
            symbols.append(Symbol("word", position, position + 1))
    return symbols, False


@dataclass
class Entry:
    index: int
    key: Symbol
    sound: bool
    """Whether the symbols before the key, and between key and value, are valid."""
    value: Symbol | None


def read_entries(text: str, symbols: list[Symbol]) -> list[Entry]:
    entries: list[Entry] = []
    keys = find_keys(text, symbols)
    for number, (at, index) in enumerate(keys):
        next_key = keys[number + 1][0] if number + 1 < len(keys) else None
        sound = is_lead(symbols[:at])
        brackets = 0
        for i in range(at + 1, len(symbols)):
            kind = symbols[i].kind
            if i == next_key:
                entries.append(Entry(index, symbols[at], False, None))
                break
            if kind == "{}" and brackets == 0:
                entries.append(
                    Entry(
                        index,
                        symbols[at],
                        sound and i == at + 2 and symbols[at + 1].kind == ":",
                        symbols[i],
                    )
                )
                break
            if kind == "}" or (kind == "," and brackets == 0):
                entries.append(Entry(index, symbols[at], False, None))
                break
            brackets = (
                brackets + 1 if kind == "[" else max(brackets - 1, 0) if kind == "]" else brackets
            )
    return entries


def find_keys(text: str, symbols: list[Symbol]) -> list[tuple[int, int]]:
    """Return the index of its symbol, and n, for each key `object_{n}` at the top level."""
    keys: list[tuple[int, int]] = []
    brackets = 0
    for i, symbol in enumerate(symbols):
        if symbol.kind in "[]":
            brackets = max(brackets + (1 if symbol.kind == "[" else -1), 0)
        if symbol.kind != '"' or symbols[i - 1].kind == ":":
            continue
        index = key_index(text[symbol.start : symbol.end])
        behind = next((character for character in text[symbol.end :] if character not in SPACE), "")
        if index is not None and (
            behind == ":" or (symbols[i - 1].kind in ("{", ",", "{}") and brackets == 0)
        ):
            keys.append((i, index))
            brackets = 0
    return keys


def key_index(quoted: str) -> int | None:
    try:
        key = json.loads(quoted)
    except ValueError:
        return None
    digits = key.removeprefix("object_")
    if (
        digits == key
        or not 1 <= len(digits) <= 9
        or any(digit not in "0123456789" for digit in digits)
        or (digits[0] == "0" and digits != "0")
    ):
        return None
    return int(digits)


def is_lead(before: list[Symbol]) -> bool:
    """Return whether a key may follow these symbols: an opening brace, or a valid comma."""
    if before[-1].kind == "{":
        return True
    return before[-1].kind == "," and before[-2].kind not in ("{", ",")


class Reader:
    """A strict recursive-descent JSON reader that accepts unquoted coordinate tokens.

    Every method moves `at` past the text that it read, or raises.
    """

    def __init__(self, text: str, offset: int, tokens: Tokens) -> None:
        self.text = text
        self.offset = offset
        self.tokens = tokens
        self.at = 0
        self.num_objects = 0

    def read_object(self) -> list[tuple[str, object]] | None:
        """Return the keys and values if the whole text is one valid JSON object, else None."""
        try:
            members = self.members()
        except ValueError:
            return None
        return members if self.at == len(self.text) else None

    def skip(self) -> str:
        """Skip spaces; return the next character."""
        while self.at < len(self.text) and self.text[self.at] in SPACE:
            self.at += 1
        return self.text[self.at] if self.at < len(self.text) else ""

    def expect(self, character: str) -> None:
        if self.skip() != character:
            raise ValueError(character)
        self.at += 1

    def members(self) -> list[tuple[str, object]]:
        self.num_objects += 1
        self.expect("{")
        members: list[tuple[str, object]] = []
        while self.skip() != "}" or members:
            key = self.string()
            self.expect(":")
            members.append(
                (unescape(self.text[key.start - self.offset : key.end - self.offset]), self.value())
            )
            if self.skip() == "}":
                break
            self.expect(",")
        self.expect("}")
        return members

    def array(self) -> list[object]:
        self.expect("[")
        items: list[object] = []
        while self.skip() != "]" or items:
            items.append(self.value())
            if self.skip() == "]":
                break
            self.expect(",")
        self.expect("]")
        return items

    def value(self) -> object:
        match self.skip():
            case "{":
                self.members()
                return None
            case "[":
                return self.array()
            case '"':
                return self.string()
            case _:
                return self.bare()

    def string(self) -> Leaf:
        if self.skip() != '"':
            raise ValueError
        start = self.at + 1
        self.at = start
        while self.text[self.at : self.at + 1] != '"':
            character = self.text[self.at : self.at + 1]
            if character < " ":
                raise ValueError
            if character == "\\":
                self.at += 1
                escape = self.text[self.at : self.at + 1]
                digits = self.text[self.at + 1 : self.at + 5]
                if (
                    escape == "u"
                    and len(digits) == 4
                    and all(digit in "0123456789abcdefABCDEF" for digit in digits)
                ):
                    self.at += 4
                elif escape == "" or escape not in '"\\/bfnrt':
                    raise ValueError
            self.at += 1
        self.at += 1
        return self.leaf(start, self.at - 1, quoted=True)

    def bare(self) -> Leaf:
        """Read a number, a word or a coordinate token, which are not in quotes."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in SPACE + '",:[]{}':
            self.at += 1
        leaf = self.leaf(start, self.at, quoted=False)
        if leaf.coord is None:
            json.loads(self.text[start : self.at], parse_constant=refuse)
        return leaf

    def leaf(self, start: int, end: int, *, quoted: bool) -> Leaf:
        span = start + self.offset, end + self.offset
        return Leaf(*span, quoted, self.tokens.coords.get(span))


def refuse(constant: str) -> object:
    raise ValueError(constant)


def unescape(raw: str) -> str:
    text = raw.encode("latin-1").decode()
    return (
        json.loads(f'"{text}"', strict=False)
        .encode("utf-16", "surrogatepass")
        .decode("utf-16", "replace")
    )


def is_utf8(text: str) -> bool:
    try:
        text.encode("latin-1").decode()
    except UnicodeDecodeError:
        return False
    return True


def cut_tokens(
    tokens: Tokens, text: str, cut: int, codec: TokenCodec
) -> tuple[list[int], int] | None:
    """Cut an answer at a byte; return the tokens that are left, and how many of them are unchanged.

    None if the token at the cut cannot be shortened.
    """
    last = tokens.owner[cut - 1]
    if cut == len(tokens.owner) or tokens.owner[cut] != last:
        return tokens.ids[: last + 1], last + 1
    start = cut
    while start > 0 and tokens.owner[start - 1] == last:
        start -= 1
    needed = text[start:cut].encode("latin-1")
    shorter = codec.encode(needed.decode(errors="replace"))
    return (
        (tokens.ids[:last] + shorter, last)
        if b"".join(map(codec.piece_bytes, shorter)) == needed
        else None
    )


def answer(
    entries: list[Entry],
    kept: tuple[list[int], int],
    text: str,
    truncated: bool,
    tokens: Tokens,
    codec: TokenCodec,
    geometry: frozenset[GeometryKind],
) -> ParsedRollout:
    ids, num_unchanged = kept
    prefix = Tokens.of(ids, codec)
    objects: list[ParsedObject] = []
    dropped: list[DroppedObject] = []
    indices = nested_indices(text)
    for entry in entries:
        if entry.key.start >= len(text):
            break
        indices.append(entry.index)
        key = f"object_{entry.index}"
        judged = judge(entry, text, tokens, codec, geometry)
        if isinstance(judged, DropReason):
            dropped.append(DroppedObject(key, judged))
            continue
        assert entry.value is not None
        kind, desc, leaf, coords, bins = judged
        span = prefix.owner[entry.value.start], prefix.owner[entry.value.end - 1] + 1
        value = (entry.value.start, entry.value.end)
        desc_value = (leaf.start, leaf.end)
        objects.append(
            ParsedObject(key, entry.index, kind, desc, bins, coords, span, value, desc_value)
        )
    shown = text.encode("latin-1").decode(errors="replace")
    return ParsedRollout(
        tuple(ids),
        shown,
        tuple(objects),
        tuple(dropped),
        max(indices),
        truncated,
        False,
        num_unchanged,
    )


def nested_indices(text: str) -> list[int]:
    """Return the n of every string `object_{n}` without escapes that precedes a colon, at any
    depth."""
    indices: list[int] = []
    start: int | None = None
    escaped = False
    for position, character in enumerate(text):
        if start is None:
            start = position if character == '"' else None
        elif escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            behind = next((later for later in text[position + 1 :] if later not in SPACE), "")
            quoted = text[start : position + 1]
            index = None if "\\" in quoted else key_index(quoted)
            indices += [index] if index is not None and behind == ":" else []
            start = None
    return indices


Judged = tuple[GeometryKind, str, Leaf, tuple[int, ...], tuple[int, ...]]


def judge(
    entry: Entry, text: str, tokens: Tokens, codec: TokenCodec, geometry: frozenset[GeometryKind]
) -> Judged | DropReason:
    if entry.value is None or not entry.sound:
        return DropReason.MALFORMED
    value = text[entry.value.start : entry.value.end]
    reader = Reader(value, entry.value.start, tokens)
    members = reader.read_object() if is_utf8(value) else None
    if members is None:
        return DropReason.MALFORMED
    keys = [key for key, _ in members]
    known = {"bbox_2d", "poly"}
    if GeometryKind.POINT in geometry:
        known.add("point_2d")
    unknown = [item for key, item in members if key != "desc" and key not in known]
    if reader.num_objects > 1 or keys.count("desc") > 1 or len(known & set(keys)) > 1:
        return DropReason.KEY_INVALID
    if unknown:
        return (
            DropReason.UNKNOWN_GEOM
            if len(unknown) == 1 and isinstance(unknown[0], list)
            else DropReason.KEY_INVALID
        )
    desc = next((item for key, item in members if key == "desc"), None)
    if (
        not isinstance(desc, Leaf)
        or not desc.quoted
        or not unescape(text[desc.start : desc.end]).strip()
    ):
        return DropReason.MISSING_DESC
    shapes = [(key, item) for key, item in members if key != "desc"]
    arrays = [item for _, item in shapes if isinstance(item, list)]
    if not arrays:
        return DropReason.MISSING_GEOM
    kind = GeometryKind(shapes[0][0])
    flat = [
        [
            leaf
            for item in array
            for leaf in (item if kind is GeometryKind.POLY and isinstance(item, list) else [item])
        ]
        for array in arrays
    ]
    if any(not isinstance(leaf, Leaf) or leaf.coord is None for array in flat for leaf in array):
        return DropReason.NON_COORD_TOKEN
    grouped = [item for item in arrays[0] if isinstance(item, list)]
    if len(shapes) > 1 or (
        grouped and (len(grouped) < len(arrays[0]) or any(len(item) != 2 for item in grouped))
    ):
        return DropReason.WRONG_ARITY
    coords = tuple(
        leaf.coord for leaf in flat[0] if isinstance(leaf, Leaf) and leaf.coord is not None
    )
    is_right = {
        GeometryKind.BBOX: len(coords) == 4,
        GeometryKind.POINT: len(coords) == 2,
        GeometryKind.POLY: len(coords) >= 6 and len(coords) % 2 == 0,
    }
    if not is_right[kind]:
        return DropReason.WRONG_ARITY
    bins = tuple(
        bin for position in coords if (bin := codec.coord_bin(tokens.ids[position])) is not None
    )
    if kind is GeometryKind.BBOX and (bins[0] > bins[2] or bins[1] > bins[3]):
        return DropReason.BBOX_INVALID
    if kind not in geometry:
        return DropReason.POLY_UNSUPPORTED
    return kind, unescape(text[desc.start : desc.end]), desc, coords, bins
