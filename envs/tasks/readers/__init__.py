"""Readers of existing task formats, one file per format.

To add a format, write a class that implements `TaskCollection` (`source.py`) and add its line to
`opening.py`, which detects the format of a path. Readers return `TaskCandidate`s; gates, grading
and machines are the same for all formats.
"""
