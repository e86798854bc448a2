"""Numbers of 7 bits a byte, the lowest first; a set high bit says that more follow."""

from penstock.messages.errors import CorruptDataError

_BYTES_MAX = 5


def leb128(number: int) -> bytes:
    """Write one number."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class TableReader:
    """Reads one number after the other."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.offset = 0

    def read(self) -> int:
        """Return the next number.

        Raises:
            CorruptDataError: it is cut short, or is too long.

        """
        value = 0
        for shift in range(0, 7 * _BYTES_MAX, 7):
            if self.offset >= len(self._view):
                raise CorruptDataError("delta.table: cut short")
            byte = self._view[self.offset]
            self.offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptDataError(f"delta.table: a number of more than {_BYTES_MAX} bytes")
