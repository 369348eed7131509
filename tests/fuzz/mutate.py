"""Mutations of bytes and of trees of values; every choice comes from the given generator."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

RAW = "\ue000"  # a text that begins so is written without quotes: what no value can express

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 65_536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    10**30, 10**309, -(10**400), 0.0, -0.0, 0.5, 1.0, 1e-320, 1e-9, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "0", "1", "-1", "NaN", "nan", "inf", "none", "true", "null", "\x00", "a\x00b", "\n", "a\nb", "\ud800",
    "\u202e", "é", "𝕏", "a" * 300, "a" * 5000, "../../x", "/etc/passwd", "~", "%s%n", "{}", "{0}", "$HOME", "`id`",
    "<script>", "classes:0", "classes:1e9", "dirichlet:0", "dirichlet:1e-300", "dirichlet:nan", "iid", "resnet8",
    "resnet2", "resnet1000000", "resnet8,resnet14", "digits", "cifar10", "fp16", "int8", "cuda:99", "meta", "cpu",
    [], {}, [[]], [{}], {"": 0}, [None], [0] * 100, [1.5, "x"], {"a": {"b": {"c": 1}}}, ["a"] * 50,
)  # fmt: skip

RAW_JSON = (
    "1" * 400, "1" * 5000, "1e999", "-1e999", "[" * 500 + "]" * 500, "[" * 100_000, "[" * 20_000 + "]" * 20_000,
    '{"a":' * 500 + "1" + "}" * 500, "NaN", "Infinity", "-", "01", "0x10", "'a'", "tru", '1, "format": 2', "1]", "1}",
    '"\\ud800"', '"\\udfff\\ud800"', '"\t"', "// c", "",
)  # fmt: skip
RAW_TOML = (
    "1" * 400, "1" * 5000, "1e999", "0x" + "f" * 300, "0x" + "f" * 5000, "0o7", "0b1", "1_000", "+1", "1979-05-27",
    "1979-05-27T07:32:00Z", "07:32:00", "[" * 500 + "]" * 500, "[" * 20_000, "[" * 5000 + "]" * 5000, "# c", "", "nul",
    "{a=" * 300 + "1" + "}" * 300, '"""a\nb"""', "'''a'''", '"\\ud800"', '"\\u0000"', "{}", "{a=1,a=2}", "inf",
    "-nan", "1\nseed = 1", "1\n[settings]", "1\n[[scenario]]", "1\n[a" + ".a" * 400 + "]",
    "1\n" + ".".join("a" * 1500) + " = 1",
)  # fmt: skip
TOKENS = (
    b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x00" * 8, b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x80", b"\r\n", b"\n", b'"',
    b"'", b"{", b"}", b"[", b"]", b",", b":", b"=", b"#", b"null", b"NaN", b"1e999", b"-1", b"\xef\xbb\xbf",
    b"\xed\xa0\x80", b"\\u0000", b"0" * 400, b"..", b"/", b"[" * 2000,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- bytes


def mutated_bytes(rng: random.Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four small changes, most often one."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = _once(rng, content, others)
    return content


def _once(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    n = len(content)
    at = rng.randrange(n) if n else 0
    if rng.random() < 0.3:  # headers are at the ends
        at = min(at, rng.randrange(min(n, 512) or 1))
    end = min(n, at + rng.choice((1, 2, 4, 8, 64, 1024)))
    match rng.randrange(12):
        case 0 | 1:
            return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] if n else b"\x00"
        case 2:
            return content[:at] + rng.randbytes(1) + content[at + 1 :]
        case 3:
            return changed_digit(rng, content)
        case 4:
            return content[:at]
        case 5:
            return content[:at] + content[end:]
        case 6:
            return content[:end] + content[at:end] * rng.choice((1, 2, 50)) + content[end:]
        case 7:
            return content[:at] + rng.choice(TOKENS) + content[at:]
        case 8:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice((0, 1, -1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), rng.getrandbits(8 * width)))
            number = (value % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
            return content[:at] + number + content[at + width :]
        case 9:
            other = rng.choice(others) if others else content
            cut = rng.randrange(len(other) + 1)
            return content[:at] + other[cut : cut + rng.choice((16, 256, 10**9))]
        case 10:
            return content + rng.randbytes(rng.choice((1, 16, 512)))
        case _:
            return content[:at] + rng.randbytes(end - at) + content[end:]


def changed_digit(rng: random.Random, content: bytes) -> bytes:
    """Another digit in place of one: what was valid JSON or TOML mostly stays so."""
    start = rng.randrange(len(content) or 1)
    for at in (*range(start, min(len(content), start + 400)), *range(max(0, start - 400), start)):
        if content[at : at + 1].isdigit():
            return content[:at] + bytes([48 + (content[at] - 48 + rng.randrange(1, 10)) % 10]) + content[at + 1 :]
    return content + b"7"


# ---------------------------------------------------------------------------------------------------------------- trees

Place = tuple[Any, Any]  # a list or dict, and a position in it


def places(tree: Any) -> list[Place]:
    """Every position below the root."""
    found: list[Place] = []
    todo = [tree] if isinstance(tree, list | dict) else []
    while todo:
        holder = todo.pop()
        for at in range(len(holder)) if isinstance(holder, list) else list(holder):
            found.append((holder, at))
            if isinstance(holder[at], list | dict):
                todo.append(holder[at])
    return found


def mutated_tree(
    rng: random.Random, tree: Any, raw: Sequence[str], others: Sequence[Any] = (), values: Any = ()
) -> Any:
    """A changed copy; ``values`` are further ones to put in, ``others`` trees to take parts of."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        spots = places(tree)
        if not spots or rng.random() < 0.01:
            tree = _value(rng, None, raw, values)
            continue
        # shallow places are as likely as all the deep ones together: long lists would take every change
        if isinstance(tree, dict) and tree and rng.random() < 0.4:
            holder, at = tree, rng.choice(list(tree))
        else:
            holder, at = rng.choice(spots)
        _change(rng, holder, at, raw, others, values)
    return tree


def _change(rng: random.Random, holder: Any, at: Any, raw: Sequence[str], others: Sequence[Any], values: Any) -> None:
    match rng.randrange(10):
        case 0:
            del holder[at]
        case 1 if isinstance(holder, list):
            holder[at:at] = [copy.deepcopy(holder[at])] * rng.choice((1, 1, 3, 200))
        case 1:
            holder[rng.choice(("", "x", "é", "a.b", f"{at}_", str(at).upper(), "\ud800", "method"))] = holder.pop(at)
        case 2 if others:
            other, where = rng.choice(places(rng.choice(others)) or [([0], 0)])
            holder[at] = copy.deepcopy(other[where])
        case 2 | 3 if others and isinstance(at, str):  # the same entry of another
            same = [o[k] for t in others for o, k in places(t) if k == at]
            holder[at] = copy.deepcopy(rng.choice(same)) if same else None
        case 4 if isinstance(holder[at], list) and len(holder[at]) > 1:
            rng.shuffle(holder[at])
        case 5:
            holder[at] = [holder[at]] if rng.random() < 0.5 else {"a": holder[at]}
        case _:
            holder[at] = _value(rng, holder[at], raw, values)


def _value(rng: random.Random, old: Any, raw: Sequence[str], values: Any) -> Any:
    if isinstance(old, bool) and rng.random() < 0.5:
        return not old
    if isinstance(old, int | float) and rng.random() < 0.5:
        changes = (
            old + 1,
            old - 1,
            -old,
            old * 2,
            old / 2 if abs(old) < 1e300 else 0,
            float(old) if abs(old) < 1e300 else 0,
        )
        return rng.choice(changes)
    if isinstance(old, str) and old and not old.startswith(RAW) and rng.random() < 0.4:
        cut = rng.randrange(len(old))
        return rng.choice((old[:cut], old[:cut] + rng.choice("\x00é:=,0z \n") + old[cut:], old.upper(), old * 2))
    if raw and rng.random() < 0.2:
        return RAW + rng.choice(raw)
    if values and rng.random() < 0.3:
        return copy.deepcopy(rng.choice(values))
    return copy.deepcopy(rng.choice(VALUES))


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def to_json(tree: Any) -> bytes:
    """As JSON, raw texts as they are."""
    return _with_raws(json.dumps(tree)).encode("utf-8", "surrogatepass")


def _with_raws(text: str) -> str:
    mark = json.dumps(RAW)[:-1]
    if mark not in text:
        return text
    # A text is raw as a whole string only; inside another one (a doubled value, JSON in JSON) the mark stays as it is.
    return _STRING.sub(lambda m: json.loads(m[0])[len(RAW) :] if m[0].startswith(mark) else m[0], text)


def to_toml(tree: Any) -> bytes:
    """As TOML, if it can be, with inline tables below the root; raw texts as they are."""
    if not isinstance(tree, dict):
        return _toml(tree).encode("utf-8", "surrogatepass")
    lines = [f"{json.dumps(str(k))} = {_toml(v)}" for k, v in tree.items()]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, str) and value.startswith(RAW):
        return value[len(RAW) :]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
