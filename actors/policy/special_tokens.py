"""Special tokens of the built-in chat format; only the format itself can write them.

Tools and arguments of the built-in harness have dedicated special tokens, so that a small model can
name them with a single token. Any other name is spelled out between generic tokens.
"""

PAD = "<|pad|>"
END = "<|end|>"
"""End of every message, including the assistant's; the stop token of sampling."""
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"

CALL_OPEN = '<call name="'
ARGUMENT_OPEN = '<arg name="'
NAME_CLOSE = '"|>'
"""End of a spelled-out name. Not `">`, which is common in code, because other systems recognize
special tokens in any text."""
CALL_CLOSE = "</call>"
ARGUMENT_CLOSE = "</arg>"

TOOL_NAMES = (
    "list_dir",
    "read_file",
    "write_file",
    "edit_file",
    "delete_file",
    "glob",
    "grep",
    "run_terminal",
    "finish",
)
ARGUMENT_NAMES = ("path", "old", "new", "content", "pattern", "command", "answer")


def call_open(tool: str) -> str:
    """Return the special token that opens a call of a known tool."""
    return f'<call name="{tool}">'


def argument_open(name: str) -> str:
    """Return the special token that opens a known argument; "" of any other."""
    # Not of every name: `|user|` would give the token of a role.
    return f"<{name}>" if name in ARGUMENT_NAMES else ""


def argument_close(name: str) -> str:
    """Return the special token that closes a known argument; "" of any other."""
    return f"</{name}>" if name in ARGUMENT_NAMES else ""


STRUCTURE_TOKENS = (
    END,
    SYSTEM,
    USER,
    ASSISTANT,
    TOOL,
    CALL_OPEN,
    ARGUMENT_OPEN,
    NAME_CLOSE,
    CALL_CLOSE,
    ARGUMENT_CLOSE,
)
"""Special tokens that the format requires."""
ALL_SPECIAL_TOKENS = (
    PAD,
    *STRUCTURE_TOKENS,
    *(call_open(tool) for tool in TOOL_NAMES),
    *(argument_open(name) for name in ARGUMENT_NAMES),
    *(argument_close(name) for name in ARGUMENT_NAMES),
)
