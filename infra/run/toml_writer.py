"""Write the TOML subset that configurations use: tables, arrays of tables, and plain values."""

import json
from typing import Any


def to_toml(data: dict[str, Any], prefix: str = "") -> str:
    """Render tables; values are strings, numbers, booleans and arrays of them."""
    plain = {k: v for k, v in data.items() if not _is_table(v) and not _is_table_array(v)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in data.items():
        path = f"{prefix}{_key(key)}"
        if _is_table(value):
            lines += ["", f"[{path}]", to_toml(value, f"{path}.")]
        elif _is_table_array(value):
            for entry in value:
                lines += ["", f"[[{path}]]", to_toml(entry, f"{path}.")]
    return "\n".join(lines)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return repr(value)
