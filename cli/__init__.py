"""The `posttrainllm` command: parse, call a room, print."""
