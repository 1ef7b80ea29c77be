"""Small files in LEAF's layout."""

import json
from pathlib import Path

LINE = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer "


def samples(text: str, count: int) -> dict[str, list[str]]:
    long = text * 3
    return {
        "x": [long[i : i + 80] for i in range(count)],
        "y": [long[i + 80] for i in range(count)],
    }


def write(path: Path, users: dict[str, dict[str, list[str]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(data["y"]) for data in users.values()],
        "user_data": users,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
