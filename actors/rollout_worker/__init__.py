"""Rollout workers: whole agent sessions, turn by turn, each in a machine of its own.

`actor.py` takes a command and makes one or several episodes of it, `episode.py` runs one
episode in a machine and counts its turns, `conversation.py` holds the tokens and
the rules of an episode's end (pure), `turns.py` samples a turn and keeps it in the log.
What an episode changed is read by `envs/tasks/changes.py`.

To add a tool, see `envs/harness`. To add an end of an episode: a member of `EpisodeEnd`, and the
rule that sets it in `conversation.py`.
"""
