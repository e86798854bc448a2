"""Readers of tasks that people already have: one file for each format.

To add a format, write a class that implements `TaskCollection` (`source.py`) and add its line to
`opening.py`, which finds out what a path holds. A reader makes `TaskCandidate`s; gates, grading and
machines are the same for all.
"""
