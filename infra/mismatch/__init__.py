"""`penstock mismatch`: trainer against sampler, token by token, with each remedy and without it."""
