"""Mid-training: next-token prediction on code and transcripts, before reinforcement learning."""
