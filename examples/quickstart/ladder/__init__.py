"""The quickstart's tasks: short functions after the standard library with one bug each.

`template.py` says what a function template is; `numbers.py`, `sequences.py` and `text.py` hold
them; `function.py` makes one concrete, with its bugs and the calls that reveal them;
`repository.py` builds a task around it; `generate.py` draws tasks of both splits and
passes them through the gates; `transcripts.py` demonstrates them for mid-training. `dry_run.py`
runs this folder's own code without a machine.

To add a function, add a `Template` to one of the three lists: everything else follows.
"""
