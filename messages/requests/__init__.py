"""Services that one role asks alone, and the state that gateways share about their requests."""
