"""Programs of the guest that keep tests apart from the code under test: two users, one socket.

```
 verifier's user                                     agent's user
 tests_side.py: a commit's tests       ──asks──▶     code_side.py: the modules of /work
 foreign_verifier.py: a task's test.sh ◀─values──    code_side.py: commands in /work
```
`pipe.py` is on both sides, `stand_ins.py` on the tests', `programs.py` makes their texts on the
host. Only plain values cross, by copy; the code under test never sees a test, and never decides
whether a value is right.
"""
