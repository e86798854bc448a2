"""A ladder of small, real coding tasks: short functions after the standard library, one bug each.

`template.py` says what a function template is; `numbers.py`, `sequences.py` and `text.py` hold
them; `mutate.py` injects one bug into the syntax tree; `instance.py` makes a named repository out
of both; `generate.py` draws the train and held-out task sets and passes every task through its
gates.

To add a function, add a `Template` to one of the three lists: everything else follows.
"""
