"""The older part of the log, in the object store: streams stay small however old a run is.

`segments.py` is what is stored, `reading.py` reads it in front of a stream, `archiver.py` moves
events there and says how full the streams are.
"""
