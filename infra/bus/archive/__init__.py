"""The older part of the log, in the object store: streams stay small however old a run is.

`segments.py` defines the stored format, `reading.py` reads it before a stream, and `archiver.py`
moves events there and reports how full the streams are.
"""
