"""Declared signals: the kinds of feedback that users and their tools may send, and their worth.

`declaration.py` has the settings of one signal, `defaults.py` the signals declared by default.
The gateway refuses undeclared signals; the feedback join scores declared ones. `preferences.py` and
`quarantine.py` have the events, other than samples, that feedback leads to, and
`episode_labels.py` has people's labels of a run's own episodes.
"""
