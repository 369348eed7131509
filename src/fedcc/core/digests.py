"""JSON files that hold their own digest and those of the files beside them, so that damage is detected.

The key ``sha256`` covers the values of all other keys, not the file's name or layout; the key ``files`` holds the
digests of other files of the folder. Files of older versions have neither and cannot be checked.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcc.core.files import write_whole

DIGEST, BESIDE = "sha256", "files"  # the keys
NUMBERS = r"\[\n[-+.\deE,\snul]*\]"  # a list of numbers in indented JSON (strings have no line breaks)
UNCHECKED = "was written by an older version, without a digest: damage to it cannot be detected"


class DamagedFile(ValueError):
    """A file whose content is not what was written."""


class Unchecked(UserWarning):
    """A file of an older version, whose content cannot be checked."""


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest of a JSON object's values, except its own digest."""
    rest = {name: value for name, value in content.items() if name != DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write a JSON object with its digest; returns what the file then holds."""
    plain = json.loads(json.dumps(dict(content)))
    sealed = {**plain, DIGEST: digest_of(plain)}
    text = re.sub(NUMBERS, lambda m: " ".join(m.group().split()), json.dumps(sealed, indent=1))
    write_whole(path, text + "\n")
    return sealed


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object and check its digest; one without a digest, of an older version, passes."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: it is not valid JSON ({error})") from None
    check_digest(path, content)
    return content  # type: ignore[no-any-return]


def check_digest(path: Path, content: Any) -> bool:
    """Refuse the content of a JSON file that does not match its digest; False if it has none."""
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} is damaged: it must hold a JSON object, got {type(content).__name__}")
    if DIGEST not in content:
        if BESIDE in content:
            raise DamagedFile(f"{path} is damaged: its {DIGEST} is missing")
        return False
    try:
        right = content[DIGEST] == digest_of(content)
    except (ValueError, RecursionError):
        right = False
    if not right:
        raise DamagedFile(f"{path} is damaged: its content does not match its {DIGEST}")
    return True


def file_digest(path: Path, name: str = "sha256") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False)).hexdigest()


def check_files(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse files that do not match the digests in the JSON file beside them; a missing file passes."""
    digests = content.get(BESIDE, {})
    if not isinstance(digests, dict) or any(Path(name).name != name for name in digests):
        raise DamagedFile(f"{path} is damaged: {BESIDE!r} must hold digests by file name")
    for name, digest in digests.items():
        beside = path.with_name(name)
        if beside.is_file() and file_digest(beside) != digest:
            raise DamagedFile(f"{beside} is damaged: it is not the file whose {DIGEST} is in {path.name}")
