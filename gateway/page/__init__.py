"""The live page and the feed of monitor state behind it."""
