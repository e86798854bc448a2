"""Declared signals: what users and their tools may say of a request, and what it is worth.

`declaration.py` has the settings of one signal, `defaults.py` those that are declared by default.
The gateway refuses what is not declared, and the feedback join scores what is. `preferences.py` and
`quarantine.py` hold the events that signals give rise to besides samples.
"""
