"""`penstock init`: a project of one's own, with a tool, a judge, tasks and a loss, and a test."""
