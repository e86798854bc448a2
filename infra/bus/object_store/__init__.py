"""Objects in a JetStream bucket, with many chunks in flight in both directions."""
