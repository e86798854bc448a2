"""Mid-training: next-token prediction on code and transcripts, before RL.

`corpus.py` reads and packs tokens, `midtrain.py` takes steps, `phase.py` runs them for the actor,
`saves.py` keeps what a killed trainer goes on from.
To add a learning-rate schedule: a branch in `midtrain.rate` and its name in `config.SCHEDULES`.
"""
