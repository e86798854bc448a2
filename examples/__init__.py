"""Programs on Penstock's public API: copy one to begin with (`penstock init`)."""
