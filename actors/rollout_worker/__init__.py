"""Rollout workers: whole agent sessions, turn by turn, in a machine of their own.

`conversation.py` holds the tokens and the rules of an episode's end (pure), `sampling.py` asks a
generator for one turn, `machine.py` leases a sandbox and reads what changed in it, `episode.py` is
the loop over them, `actor.py` takes the work.
"""
