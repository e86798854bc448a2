"""`penstock simulate sandboxes`: a burst of machines through the real scheduler."""
