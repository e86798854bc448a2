"""Programs in the guest that keep tests apart from the code under test: two users, one socket.

```
 verifier's user                                     agent's user
 tests_side.py: a commit's tests       ──asks──▶     code_side.py: the modules of /work
 foreign_verifier.py: a task's test.sh ◀─values──    code_side.py: commands in /work
```
`pipe.py` is part of both sides and `stand_ins.py` of the tests' side; `programs.py` assembles their
texts on the host. Only plain values cross the socket, as copies. The code under test never sees a
test, and never decides whether a value is right.
"""
