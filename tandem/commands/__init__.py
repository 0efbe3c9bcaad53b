"""The verbs of the `tandem` command, one module a group; each has `register(app)`. Neither torch nor vLLM at import."""
