"""Subscribers that copy a run's metrics to the programs where people look at them.

A sink is a process of its own that reads the log, live or afterwards: no actor waits for it. To
add one: a module with a class that meets `Sink` (`sink.py`) and a line in its `SINKS`.
"""
