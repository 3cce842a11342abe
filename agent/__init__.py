"""Text in, events out: tools, their executor, the conversation loop."""
