"""What turns a request into events: OpenAI-compatible servers, the scripted backend, our engine."""
