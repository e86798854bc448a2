"""`POST /v1/chat/completions`: request, prompt, generation, reply, record."""
