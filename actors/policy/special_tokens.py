"""The special tokens of the chat format: only the format writes them.

Tools and arguments that the built-in harness uses have special tokens of their own, so that a small
model names them with one token; any other name is spelled between generic ones.
"""

PAD = "<|pad|>"
END = "<|end|>"
"""Ends every message, the assistant's too: the stop token of sampling."""
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"

CALL_OPEN = '<call name="'
ARGUMENT_OPEN = '<arg name="'
NAME_CLOSE = '"|>'
"""Not `">`, which ordinary code holds: other systems parse special tokens in any text."""
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
    """Return the special token that opens a known argument."""
    return f"<{name}>"


def argument_close(name: str) -> str:
    """Return the special token that closes a known argument."""
    return f"</{name}>"


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
"""What the format cannot do without."""
ALL_SPECIAL_TOKENS = (
    PAD,
    *STRUCTURE_TOKENS,
    *(call_open(tool) for tool in TOOL_NAMES),
    *(argument_open(name) for name in ARGUMENT_NAMES),
    *(argument_close(name) for name in ARGUMENT_NAMES),
)
