"""`python -m tests.lab weights`: delta codecs and their peers on the same weights, in one run.

`command.py` is the entry; `pairs.py` makes or reads pairs of neighboring checkpoints,
`contestants.py` lists the codecs, `measure.py` times them in turn, `scaling.py` the ladder over
threads and shards, `report.py` says what was reached.
To add a codec: a row in `contestants.py`.
"""
