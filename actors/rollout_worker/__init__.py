"""Rollout workers: whole agent sessions, turn by turn, in a machine of their own.

`conversation.py` holds the tokens and the rules of an episode's end (pure), `sampling.py` asks a
generator for one turn, `journal.py` is what the log has of an episode, `stage.py` plays turns in a
machine, `changes.py` reads what they left there, `account.py` counts, `episode.py` is the loop over
them, `tree.py` makes one or several episodes of a command, `actor.py` takes the work.
"""
