"""The HTTP edge: parse, ask the pipeline, render. The only room that knows status codes."""
