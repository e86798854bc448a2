"""The actors: each folder is one role; `runtime` and `policy` are shared by them."""
