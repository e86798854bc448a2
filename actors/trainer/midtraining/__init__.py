"""Mid-training: next-token prediction on code and transcripts, before RL.

`corpus.py` reads and packs tokens, `midtrain.py` takes steps, `phase.py` runs them for the actor,
and `saves.py` stores the state from which a restarted trainer resumes. To add a learning-rate
schedule, add a branch to `midtrain.rate` and its name to `config.SCHEDULES`.
"""
