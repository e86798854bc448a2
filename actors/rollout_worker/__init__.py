"""Rollout workers: whole agent sessions, turn by turn, each in a machine of its own.

`conversation.py` holds the tokens and the rules of an episode's end (pure), `sampling.py` asks a
generator for one turn, `journal.py` is what the log has of an episode, `episode_runner.py` plays
turns in a machine and counts them, `changes.py` reads what they left there, `episode.py` is the
loop over them, `rollout_runner.py` makes one or several episodes of a command, `actor.py` takes
the work.

To add a tool, see `envs/harness`. To add an end of an episode: a member of `EpisodeEnd`, and the
rule that sets it in `conversation.py`.
"""
