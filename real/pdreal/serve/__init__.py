"""The HTTP front end: OpenAI's completions and SGLang's generate in front of a running cluster."""
